"""What all attention layers hold: preallocated buffers, and where a block is written to them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from hf_spec.cache.attention import AttentionLayer, zeros
from hf_spec.core.buckets import bucket
from hf_spec.core.transfer import sent

#: Views end on multiples of this many slots: fused attention kernels need aligned masks.
ALIGNMENT = 16
#: Smallest capacity, in slots.
SMALLEST = 256

#: Allocates a buffer of the given shape, dtype and device.
Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
#: Selects this process's heads from learned states ``(kv_heads, slots, head_dim)``.
Share = Callable[[Tensor, int], Tensor]
#: A layer's index and ``keys``, ``values`` or ``indexer_keys``.
Member = tuple[int, str]


class AttentionStates:
    """The buffers of all attention layers: nothing is concatenated, only accepted slots are copied.

    All layers of equal shape share one buffer, so a commit is one gather and one scatter.
    Capacities are powers of two, as code is compiled for each size.

    *Front* slots, before the rows' tokens, can hold learned keys and values. They are the same for
    every row, and only forwards that ask for them see them. Slot numbers always count from the
    first token.

    Args:
        layers: the layers, which get views of the buffers.
        allocate: allocates buffers; their values must be finite.
    """

    def __init__(
        self, layers: Sequence[AttentionLayer], batch_size: int, allocate: Allocate = zeros
    ):
        self.layers = list(layers)
        self.batch_size = batch_size  # rows in use; those dropped come after them
        self.capacity = 0  # slots allocated per row, without the front slots
        self.front = 0  # number of front slots
        self.traced = False  # whether this is what a graph sees, see traced_with
        self._new = allocate
        #: What :meth:`set_front` was given until layers have slots for it.
        self._learned: Sequence[tuple[Tensor, Tensor]] = ()
        self._own: Share | None = None
        self._groups: list[tuple[Tensor, list[Member]]] = []
        #: What :meth:`flat` has made, and for which slots.
        self._flat: tuple[Tensor, dict[tuple[int, int, torch.device], Tensor]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no block has been committed yet, so that no buffers exist."""
        return not self._groups

    # -- buffers -----------------------------------------------------------------------------

    def buffers(self) -> Iterator[tuple[Tensor, Member]]:
        """Each buffer ``(batch, kv_heads, front + capacity, head_dim)`` with its layer index and
        what it holds."""
        for storage, members in self._groups:
            yield from zip(storage[:, : self.batch_size], members)

    def allocate(self, sources: dict[Member, Tensor], slots: int) -> None:
        """Allocate a buffer for all sources of equal shape, dtype and device, of at least so many
        slots per row."""
        self.capacity = rounded(slots)
        groups: dict[tuple, list[Member]] = {}
        for key, tensor in sources.items():
            signature = tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device
            groups.setdefault(signature, []).append(key)
        made = []
        for (heads, dim, dtype, device), members in groups.items():
            # Layers first: some models view a layer's rows and heads as one dimension.
            shape = (len(members), self.batch_size, heads, self.front + self.capacity, dim)
            made.append((self._new(shape, dtype, device), members))
        self._groups = made  # all at once: memory may run out before
        self.attach()

    def attach(self) -> None:
        """Give the layers their views."""
        for view, (index, name) in self.buffers():
            self.layers[index].attach(name, view, self.front)

    def join(self) -> None:
        """Move the states of the first block into shared buffers."""
        made = {
            (index, name): states
            for index, layer in enumerate(self.layers)
            for name, states in layer.with_front.items()
        }
        self.allocate(made, self.capacity)
        while made:
            (index, name), states = made.popitem()
            self.layers[index].with_front[name][:, :, : states.shape[2]] = states
        self._learned = ()

    def reserve(self, slots: int) -> None:
        """Make room for ``slots`` slots per row; grows by doubling, so that copies are rare."""
        if slots > self.capacity:
            self._resize(self.front, rounded(slots))

    def release(self) -> list[Tensor]:
        """Return the buffers for use by another cache; this one must not be used again."""
        buffers, self._groups = [storage for storage, _ in self._groups], []
        return buffers

    def rehouse(self, allocate: Allocate) -> list[Tensor]:
        """Move everything into buffers of this allocator, also those that come later; return the
        old buffers. If memory runs out, everything stays where it is, and none are returned."""
        buffers, self._new = [storage for storage, _ in self._groups], allocate
        try:
            self._resize(self.front, self.capacity)
        except torch.OutOfMemoryError:
            return []
        return buffers

    def _resize(self, front: int, capacity: int) -> None:
        """Move everything to buffers with these numbers of front slots and token slots, neither of
        which is smaller than before."""
        groups = []
        for storage, members in self._groups:
            shape = (*storage.shape[:3], front + capacity, storage.shape[4])
            grown = self._new(shape, storage.dtype, storage.device)
            grown[:, :, :, front - self.front : front + self.capacity] = storage
            groups.append((grown, members))
        self._groups, self.front, self.capacity = groups, front, capacity
        self.attach()

    def widen(self, layer: AttentionLayer, name: str, dtype: torch.dtype) -> None:
        """Hold what a layer calls so, and all that share its buffer, in this dtype."""
        if self.is_empty:  # the layer's first block, not yet in a shared buffer
            layer.attach(name, layer.with_front[name].to(dtype), self.front)
            return
        for place, (storage, members) in enumerate(self._groups):
            if (layer.index, name) in members:
                wide = self._new(tuple(storage.shape), dtype, storage.device).copy_(storage)
                self._groups[place] = wide, members
        self.attach()

    # -- slots -------------------------------------------------------------------------------

    def write(self, view: Tensor, slots: Tensor, states: Tensor) -> None:
        """Write states ``(batch, heads, n, dim)`` into slots ``(batch, n)`` of a layer's keys or
        values ``(batch, heads, front + capacity, dim)``, non-finite numbers as 0."""
        finite = states.nan_to_num(0.0, 0.0, 0.0).to(view.dtype)
        if self.traced:  # code writes in place only to what is indexed directly
            slots = slots.to(view.device) + self.front
            view[_rows(slots), :, slots] = finite.transpose(1, 2)
        else:
            to = self._flat_slots(slots, view.shape[1], view.shape[2], view.device)
            view.view(-1, view.shape[3]).index_copy_(0, to, finite.flatten(0, 2))

    def _flat_slots(self, slots: Tensor, heads: int, size: int, device: torch.device) -> Tensor:
        """Where slots are in a layer's keys or values, seen as ``(batch * heads * size, dim)``:
        ``(batch * heads * n,)``, made once for the same ``slots``."""
        # One index of whole vectors is several times as fast as one index per dimension.
        if self._flat is None or self._flat[0] is not slots:
            self._flat = slots, {}
        made = self._flat[1]
        if (key := (heads, size, device)) not in made:
            starts = torch.arange(len(slots) * heads, device=slots.device) * size + self.front
            at = starts.view(-1, heads, 1) + slots[:, None]
            made[key] = at.flatten().to(device)
        return made[key]

    def move(self, lengths: Tensor, path: Tensor) -> None:
        """Copy the slots ``path`` ``(batch, depth)`` after each row's ``lengths`` ``(batch,)``
        tokens, the root's first, right behind these tokens."""
        accepted = lengths[:, None] + path.to(lengths.device)
        first = lengths[:, None] + torch.arange(path.shape[1], device=lengths.device)
        for storage, _ in self._groups:
            if self.traced:
                source = accepted.to(storage.device) + self.front
                self.write(storage, first, storage[_rows(source), :, source].transpose(1, 2))
                continue
            layers = storage.flatten(1, 3)  # a view, with the dropped rows last
            shape = storage.shape[2], storage.shape[3], storage.device
            moved = layers.index_select(1, self._flat_slots(accepted, *shape))
            layers.index_copy_(1, self._flat_slots(first, *shape), moved)

    # -- as inputs of a graph ----------------------------------------------------------------

    @property
    def members(self) -> tuple[Member, ...]:
        """The layers' keys and values in the order of :meth:`tensors`."""
        return tuple(member for _, members in self._groups for member in members)

    def tensors(self) -> list[Tensor]:
        """The layers' keys and values, in the shape of :meth:`buffers`."""
        return [self.layers[index].with_front[name] for index, name in self.members]

    def traced_with(self, layers: Sequence[AttentionLayer], tensors: Iterable[Tensor]) -> Self:
        """The same states in these layers and :meth:`tensors`, as a graph sees them."""
        own = copy.copy(self)
        own.layers, own.traced = list(layers), True
        own._groups = [(tensor, [member]) for tensor, member in zip(tensors, self.members)]
        for tensor, ((index, name),) in own._groups:
            own.layers[index].attach(name, tensor, own.front)
        return own

    # -- learned states in front -------------------------------------------------------------

    def set_front(self, states: Sequence[tuple[Tensor, Tensor]], own: Share | None = None) -> None:
        """Put learned keys and values into the last front slots.

        Args:
            states: per layer, keys and values ``(kv_heads, slots, head_dim)``, the same number of
                slots in every layer.
            own: selects this process's heads, given their number; None if it has all heads.

        Raises:
            ValueError: if they do not match the cache's layers, heads and dimensions. An empty
                cache raises it in the first block.
        """
        count = states[0][0].shape[1] if states else 0
        if aligned(count) > self.front:
            self._resize(aligned(count), self.capacity)
        if len(states) != len(self.layers):
            raise ValueError(f"{len(states)} layers of learned states for {len(self.layers)}.")
        self._learned, self._own = states, own
        if not self.is_empty:  # else layers do not know their shapes yet
            for layer in self.layers:
                self.put_front(layer)
            self._learned = ()

    def put_front(self, layer: AttentionLayer) -> None:
        """Put the states of :meth:`set_front` into the slots of a layer, which it has now."""
        pair = self._learned[layer.index] if self._learned else ()
        for name, learned in zip(("keys", "values"), pair):
            have = layer.with_front[name]
            state = learned if self._own is None else self._own(learned, have.shape[1])
            place = have[:, :, self.front - state.shape[1] : self.front]
            if place.shape[1:] != state.shape:
                raise ValueError(
                    f"layer {layer.index}: learned {name} of shape {tuple(state.shape)}, the "
                    f"model's have {have.shape[1]} heads of dimension {have.shape[3]}."
                )
            place.copy_(bounded(state.to(place.dtype)))

    # -- rows --------------------------------------------------------------------------------

    def select(self, rows: Sequence[int], length: int) -> None:
        """Keep these rows, each at most once, in this order, in place: ``length`` slots of those
        that change their index are copied."""
        moved = [(index, row) for index, row in enumerate(rows) if index != row]
        for storage, _ in self._groups if moved else ():
            into, source = (sent(x, storage.device) for x in zip(*moved))
            used = storage[:, :, :, : self.front + length]
            used.index_copy_(1, into, used.index_select(1, source))
        self.batch_size = len(rows)
        self.attach()

    def repeat(self, rows: Tensor) -> None:
        """Copy rows into buffers of ``len(rows)`` rows; rows may repeat."""
        self._groups = [
            (storage.index_select(1, rows.to(storage.device)), members)
            for storage, members in self._groups
        ]
        self.batch_size = len(rows)
        self.attach()

    # -- copies ------------------------------------------------------------------------------

    def packed(self, length: int) -> dict[str, Any]:
        """What pickles hold: the slots in use of each buffer, not the layers' views, which would
        come back as tensors of their own."""
        used = self.front + length
        buffers = [
            (storage[:, : self.batch_size, :, :used].clone(), list(members))
            for storage, members in self._groups
        ]
        # The first block of an empty cache is not in shared buffers yet.
        first = [{} if buffers else layer.with_front for layer in self.layers]
        return {
            "buffers": buffers, "capacity": length if buffers else self.capacity, "first": first,
            "front": self.front, "learned": (self._learned, self._own),
        }  # fmt: skip

    def unpack(self, packed: dict[str, Any]) -> None:
        """Inverse of :meth:`packed`, for new states."""
        self._groups, self.front = packed["buffers"], packed["front"]
        self.capacity, (self._learned, self._own) = packed["capacity"], packed["learned"]
        for layer, states in zip(self.layers, packed["first"]):
            for name, with_front in states.items():
                layer.attach(name, with_front.clone(), self.front)
        if self._groups:
            self._resize(self.front, rounded(self.capacity))


def bounded(learned: Tensor) -> Tensor:
    """Clamp learned values, which may be as large as their dtype allows, so that the product of any
    two is finite: attention computes scores for masked slots too, which must not overflow."""
    most = torch.finfo(learned.dtype).max ** 0.5
    return learned.nan_to_num(0.0, 0.0, 0.0).clamp(-most, most)


def aligned(slots: int) -> int:
    return -(-slots // ALIGNMENT) * ALIGNMENT


def rounded(slots: int) -> int:
    """The capacity for so many slots."""
    return max(SMALLEST, bucket(slots))


def _rows(slots: Tensor) -> Tensor:
    """``(batch, 1)`` the index of each row."""
    return torch.arange(len(slots), device=slots.device)[:, None]
