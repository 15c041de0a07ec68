"""The preallocated buffers of all attention layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.cache.attention import AttentionLayer, zeros
from hf_spec.core.buckets import bucket

#: Views end on multiples of this many slots: fused attention kernels need aligned masks.
ALIGNMENT = 16
#: Smallest capacity, in slots, of buffers of bucketed sizes.
BUCKET = 256

#: Allocates a buffer of the given shape, dtype and device.
Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
#: Selects this process's heads from learned states ``(kv_heads, slots, head_dim)``.
Share = Callable[[Tensor, int], Tensor]
#: A layer's index and ``keys`` or ``values``.
Member = tuple[int, str]


class AttentionStates:
    """The buffers of all attention layers: nothing is concatenated, only accepted slots are copied.

    All layers of equal shape share one buffer, so a commit is one gather and one scatter. For
    compiled code, each layer has its own buffer.

    *Front* slots, before the rows' tokens, can hold learned keys and values. They are the same for
    every row, and only forwards that ask for them see them. Slot numbers always count from the
    first token.

    Args:
        layers: the layers, which get views of the buffers.

    Attributes:
        batch_size: rows in use; those that were dropped come after them.
        capacity: slots allocated per row, without the front slots.
        buckets: whether the capacity is a power of two; see :meth:`use_buckets`.
        front: number of front slots.
    """

    def __init__(self, layers: Sequence[AttentionLayer], batch_size: int):
        self.layers = list(layers)
        self.batch_size = batch_size
        self.capacity = self.front = 0
        self.buckets = False
        self._new: Allocate = zeros
        #: Empty buffers only: states for the front slots, and the function that selects our heads.
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
        ``keys`` or ``values``."""
        for storage, members in self._groups:
            yield from zip(storage[:, : self.batch_size], members)

    def allocate(self, sources: dict[Member, Tensor], capacity: int) -> None:
        """Allocate one buffer per group of tensors of equal shape, dtype and device."""
        self.capacity = self._rounded(capacity)
        groups: dict[tuple, list[Member]] = {}
        for key, tensor in sources.items():
            # Compiled code must not write to part of a buffer: it would copy the whole buffer.
            apart = key if self.buckets else None
            signature = (tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device, apart)
            groups.setdefault(signature, []).append(key)
        for (heads, dim, dtype, device, _), members in groups.items():
            # Layers first: some models view a layer's rows and heads as one dimension.
            shape = (len(members), self.batch_size, heads, self.front + self.capacity, dim)
            self._groups.append((self._new(shape, dtype, device), members))
        self.attach()

    def attach(self) -> None:
        """Give the layers their views."""
        for storage, members in self._groups:
            for view, (index, name) in zip(storage[:, : self.batch_size], members):
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
        self._learned, self._own = (), None

    def reserve(self, slots: int) -> None:
        """Make room for ``slots`` slots per row; grows by doubling, so that copies are rare."""
        if slots <= self.capacity:
            return
        self._resize(self.front, self._rounded(max(slots, 2 * self.capacity)))

    def use_buckets(self, allocate: Allocate | None = None) -> None:
        """Round capacities up to powers of two from now on: code is compiled for each size.

        Args:
            allocate: allocates buffers; their values must be finite.
        """
        if self.buckets:
            return
        self.buckets = True
        self._new = allocate or zeros
        capacity = self._rounded(self.capacity)
        if self._groups:
            self._groups = [
                (storage[part : part + 1].clone(), [member])
                for storage, members in self._groups
                for part, member in enumerate(members)
            ]
            self._resize(self.front, capacity)

    def release(self) -> list[Tensor]:
        """Return the buffers for use by another cache; this one must not be used again."""
        buffers, self._groups = [storage for storage, _ in self._groups], []
        return buffers

    def _rounded(self, slots: int) -> int:
        return max(BUCKET, bucket(slots)) if self.buckets else aligned(slots)

    def _resize(self, front: int, capacity: int) -> None:
        """Move everything to buffers with these numbers of front slots and token slots."""
        kept = min(front, self.front)
        groups = []
        for storage, members in self._groups:
            shape = list(storage.shape)
            shape[3] = front + capacity
            grown = self._new(tuple(shape), storage.dtype, storage.device)
            start = front - kept
            stop = start + kept + self.capacity
            grown[:, :, :, start:stop] = storage[:, :, :, self.front - kept :]
            groups.append((grown, members))
        self._groups, self.front, self.capacity = groups, front, capacity
        self.attach()

    def widen(self, layer: AttentionLayer, name: str, dtype: torch.dtype) -> None:
        """Hold a layer's ``keys`` or ``values``, and all that share its buffer, in this dtype."""
        if self.is_empty:  # the layer's first block, not yet in a shared buffer
            layer.attach(name, layer.with_front[name].to(dtype), self.front)
            return
        member, groups = (self.layers.index(layer), name), []
        for storage, members in self._groups:
            if member in members:
                wide = self._new(tuple(storage.shape), dtype, storage.device)
                storage = wide.copy_(storage)
            groups.append((storage, members))
        self._groups = groups
        self.attach()

    def flat(self, slots: Tensor, heads: int, size: int, device: torch.device) -> Tensor:
        """Where slots are in a layer's keys or values, seen as ``(batch * heads * size, dim)``.

        One index of whole vectors is several times as fast as one index per dimension.

        Args:
            slots: ``(batch, n)``
            heads: of the layer.
            size: slots of each row and head, those in front included.

        Returns:
            ``(batch * heads * n,)`` int64; made once for the same ``slots``.
        """
        if self._flat is None or self._flat[0] is not slots:
            self._flat = slots, {}
        made = self._flat[1]
        if (key := (heads, size, device)) not in made:
            starts = torch.arange(len(slots) * heads, device=slots.device) * size + self.front
            at = starts.view(-1, heads, 1) + slots[:, None]
            made[key] = at.flatten().to(device)
        return made[key]

    # -- learned states in front -------------------------------------------------------------

    def set_front(self, states: Sequence[tuple[Tensor, Tensor]], own: Share | None = None) -> None:
        """Put learned keys and values into the last front slots.

        Forwards whose block began with ``front=True`` see them where the mask allows it.

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
        if self.is_empty:  # layers do not know their shapes yet
            self._learned, self._own = states, own
            return
        for index, pair in enumerate(states):
            self._put_front(index, pair, own)

    def first_block_of(self, layer: AttentionLayer) -> None:
        """Put the learned states in front of a layer whose first slots were just allocated."""
        index = self.layers.index(layer)
        if self._learned:
            self._put_front(index, self._learned[index], self._own)

    def _put_front(self, index: int, pair: tuple[Tensor, Tensor], own: Share | None) -> None:
        for name, learned in zip(("keys", "values"), pair):
            have = self.layers[index].with_front[name]
            state = learned if own is None else own(learned, have.shape[1])
            place = have[:, :, self.front - state.shape[1] : self.front]
            if place.shape[1:] != state.shape:
                raise ValueError(
                    f"layer {index}: learned {name} of shape {tuple(state.shape)}, the model's "
                    f"have {have.shape[1]} heads of dimension {have.shape[3]}."
                )
            place.copy_(bounded(state.to(place.dtype)))

    # -- rows and accepted paths -------------------------------------------------------------

    def move(self, lengths: Tensor, path: Tensor) -> None:
        """Copy the slots of an accepted path behind each row's tokens.

        Args:
            lengths: ``(batch,)``
            path: ``(batch, depth)`` slots after each row's tokens, the root's first.
        """
        accepted = lengths[:, None] + path.to(lengths.device)
        kept = lengths[:, None] + torch.arange(path.shape[1], device=lengths.device)
        for storage, _ in self._groups:
            layers = storage.flatten(1, 3)  # a view, with the dropped rows last
            shape = *storage.shape[2:4], storage.device
            moved = layers.index_select(1, self.flat(accepted, *shape))
            layers.index_copy_(1, self.flat(kept, *shape), moved)

    def select(self, rows: Sequence[int], length: int) -> None:
        """Keep these rows in this order, in place: a row that keeps its index is not copied.

        Args:
            rows: the former index of each row; each at most once.
            length: slots of the longest row.
        """
        moved = [(index, row) for index, row in enumerate(rows) if index != row]
        for storage, _ in self._groups if moved else ():
            into, source = (torch.tensor(x, device=storage.device) for x in zip(*moved))
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
        """What pickles hold: the slots in use of each buffer, not the layers' views.

        Pickled views would come back as tensors of their own, which do not see what is written
        into the buffers.
        """
        used = self.front + length
        buffers = [
            (storage[:, : self.batch_size, :, :used].clone(), list(members))
            for storage, members in self._groups
        ]
        # The first block of an empty cache is not in shared buffers yet.
        first = [{} if buffers else layer.with_front for layer in self.layers]
        return {
            "buffers": buffers, "first": first, "front": self.front, "buckets": self.buckets,
            "capacity": self.capacity, "learned": (self._learned, self._own),
        }  # fmt: skip

    def unpack(self, packed: dict[str, Any]) -> None:
        """Inverse of :meth:`packed`, for new states."""
        self.front, self.buckets = packed["front"], packed["buckets"]
        self.capacity, (self._learned, self._own) = packed["capacity"], packed["learned"]
        for layer, states in zip(self.layers, packed["first"]):
            for name, with_front in states.items():
                layer.attach(name, with_front.clone(), self.front)
        for part, members in packed["buffers"]:
            self.capacity = self._rounded(part.shape[3] - self.front)
            shape = (*part.shape[:3], self.front + self.capacity, part.shape[4])
            storage = zeros(shape, part.dtype, part.device)
            storage[:, :, :, : part.shape[3]] = part
            self._groups.append((storage, members))
        self.attach()


def bounded(learned: Tensor) -> Tensor:
    """Clamp learned values so that the product of any two is finite.

    An adapter's values may be as large as its dtype allows. Attention computes scores for masked
    slots too, and these scores must not overflow.
    """
    most = torch.finfo(learned.dtype).max ** 0.5
    return learned.nan_to_num(0.0, 0.0, 0.0).clamp(-most, most)


def aligned(slots: int) -> int:
    return -(-slots // ALIGNMENT) * ALIGNMENT
