"""What all attention layers hold: preallocated buffers, and where a block is written to them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from hf_spec.cache.attention import AttentionLayer, zeros
from hf_spec.core import mask as masks
from hf_spec.core.buckets import bucket
from hf_spec.core.transfer import to_device

#: Views end on multiples of this many slots: fused attention kernels need aligned masks.
ALIGNMENT = 16
#: Capacities are multiples of this many slots, or powers of two from the second number on where
#: code is compiled for each size.
STEP, SMALLEST = 64, 256
#: Layers share a buffer unless it would have more than this share of all slots' bytes, and more
#: than this many bytes: while one cache is moved into another, both hold one buffer's states.
SHARE, LARGE = 1 / 16, 2**23
#: Fewest slots by which a cache grows, unless its limit is known; and those that it then has for
#: a step's nodes behind all tokens.
GROWTH, NODES = 256, 64

#: Allocates a buffer of the given shape, dtype and device.
Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
#: Selects this process's heads from learned states ``(kv_heads, slots, head_dim)``.
HeadSelector = Callable[[Tensor, int], Tensor]
#: A layer's index and ``keys``, ``values`` or ``indexer_keys``.
BufferKey = tuple[int, str]
#: Heads, their dimension, dtype, device and window, which are equal in a buffer.
Signature = tuple[int, int, torch.dtype, torch.device, int | None]


class AttentionStates:
    """The buffers of all attention layers: nothing is concatenated, only accepted slots are copied.

    Layers of equal shape share buffers, so that a commit is a few gathers and scatters. Token ``i``
    is in slot ``i`` modulo the buffer's slots: that of layers with a window is a ring which keeps
    the last tokens, and :func:`hf_spec.core.mask.places` says which.

    *Front* slots, before the rows' tokens, can hold learned keys and values. They are the same for
    every row, and only forwards that ask for them see them. Slot numbers always count from the
    first token.

    Args:
        layers: the layers, which get views of the buffers.
        allocate: see :meth:`allocate_by`.

    Attributes:
        limit: tokens that no row will exceed; None if that is not known.
    """

    def __init__(
        self, layers: Sequence[AttentionLayer], batch_size: int, allocate: Allocate | None = None
    ):
        self.layers = list(layers)
        self.batch_size = batch_size  # rows in use; those dropped come after them
        self.capacity = 0  # slots per row where all tokens are kept, without the front slots
        self.room = NODES  # nodes of a block that overwrite nothing which their windows need
        self.windows: dict[int, int] = {}  # of layers that keep no more, by their index
        self.front = 0  # number of front slots
        self.traced = False  # whether this is what a graph sees, see traced_with
        self.limit: int | None = None
        self._groups: list[tuple[Tensor, list[BufferKey]]] = []
        self.allocate_by(allocate)
        #: What :meth:`flat` has made, and for which slots.
        self._flat: tuple[Tensor, dict[tuple[int, int, torch.device], Tensor]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no layer has states yet."""
        return not self._groups

    # -- buffers -----------------------------------------------------------------------------

    def slots(self, window: int | None) -> int:
        """Slots per row of layers that see this window, without the front slots."""
        return self._slots_of(window, self.capacity, self.room)

    def _slots_of(self, window: int | None, capacity: int, room: int) -> int:
        if window is None or window not in self.windows.values():
            return capacity
        return min(capacity, -(-(window - 1 + room) // STEP) * STEP)

    def allocate_by(self, allocate: Allocate | None) -> None:
        """Set what allocates buffers, whose values must be finite, for compiled code: their sizes
        then recur, and one holds all layers of equal shape. None: where nothing is compiled."""
        self._new, self._recur = allocate or zeros, allocate is not None

    def allocate(self, kinds: dict[BufferKey, Signature]) -> Iterator[list[BufferKey]]:
        """Allocate buffers for layers' keys and values, one after the other. Gives those of each,
        which the caller fills before the next one is made, and may free what they come from."""
        for (heads, dim, dtype, device, window), members in self._shared(kinds):
            # Layers first: some models view a layer's rows and heads as one dimension.
            shape = len(members), self.batch_size, heads, self.front + self.slots(window), dim
            self._groups.append((self._new(shape, dtype, device), members))
            self._attach(*self._groups[-1])
            yield members

    def add(self, index: int, first: dict[str, Tensor]) -> None:
        """Allocate buffers for a layer of an empty cache, whose first states these are."""
        window = self.windows.get(index)
        kinds = {(index, name): signature(one, window) for name, one in first.items()}
        for _ in self.allocate(kinds):
            pass

    def _shared(self, kinds: dict[BufferKey, Signature]) -> list[tuple[Signature, list[BufferKey]]]:
        """Which of them share a buffer, in the order of their layers."""
        groups: dict[Signature, list[BufferKey]] = {}
        for member, kind in kinds.items():
            groups.setdefault(kind, []).append(member)
        parts = []
        for kind, members in groups.items():
            heads, dim, dtype, _, window = kind
            slots = self.front + self.slots(window)
            size = self.batch_size * heads * slots * dim * dtype.itemsize
            count = max(math.ceil(SHARE * len(members)), LARGE // max(size, 1), 1)
            count = len(members) if self._recur else count
            parts += [
                (kind, members[start : start + count]) for start in range(0, len(members), count)
            ]
        return sorted(parts, key=lambda part: part[1][0])

    def attach(self) -> None:
        """Give the layers their views."""
        for group in self._groups:
            self._attach(*group)

    def _attach(self, storage: Tensor, members: list[BufferKey]) -> None:
        for view, (index, name) in zip(storage[:, : self.batch_size], members):
            self.layers[index].attach(name, view, self.front)

    def reserve(self, slots: int, nodes: int = 0, ends: Callable[[], Tensor] | None = None) -> None:
        """Make room for ``slots`` slots per row, the last of them of a block of so many nodes.
        Buffers grow by a quarter, or double if sizes recur, so that copies are rare.

        Args:
            ends: gives the tokens and nodes ``(batch,)`` that are written, where windows are.
        """
        if slots > self.capacity:
            exactly = self._recur or self.is_empty
            self._resize(self._sized(slots if exactly else self.ahead(slots)))
        if self.windows and nodes > self.room:
            assert ends is not None
            self._widen_rings(bucket(nodes), ends())

    def ahead(self, slots: int) -> int:
        """So many slots, and those to allocate with them as they will be needed soon."""
        more = slots + max(slots // 4, GROWTH)
        return more if self.limit is None else max(slots, min(more, self.limit + NODES))

    def _sized(self, slots: int) -> int:
        """The capacity for so many slots."""
        return max(SMALLEST, bucket(slots)) if self._recur else -(-slots // STEP) * STEP

    def release(self) -> list[Tensor]:
        """Return the buffers for use by another cache, if any will have such; this one must not be
        used again."""
        buffers, self._groups = [storage for storage, _ in self._groups], []
        return buffers if self._recur else []

    def rehouse(self, allocate: Allocate | None) -> list[Tensor]:
        """Move everything into buffers of this allocator, see :meth:`allocate_by`; return the old
        buffers. If memory runs out, what has not moved stays where it is, and none are returned."""
        buffers = [storage for storage, _ in self._groups]
        self.allocate_by(allocate)
        try:
            self._resize(self._sized(self.capacity))
        except torch.OutOfMemoryError:
            return []
        return buffers

    def leave_to_layers(self) -> None:
        """Have the layers alone hold the buffers, which go with the last view of them, unless they
        are to be used again."""
        if not self._recur:
            self._groups = []

    def _resize(self, capacity: int) -> None:
        """Move everything to larger buffers, one after the other."""
        for place, (storage, members) in enumerate(self._groups):
            slots = self._slots_of(self._window_of(members), capacity, self.room)
            self._groups[place] = self._enlarged(storage, members, self.front, slots), members
            self._attach(*self._groups[place])
        self.capacity = capacity

    def _window_of(self, members: list[BufferKey]) -> int | None:
        return self.windows.get(members[0][0])

    def _enlarged(
        self, storage: Tensor, members: list[BufferKey], front: int, slots: int
    ) -> Tensor:
        """A copy of a buffer with these numbers of front slots and token slots, neither of which
        is smaller than before."""
        shape = (*storage.shape[:3], front + slots, storage.shape[4])
        grown = self._new(shape, storage.dtype, storage.device)
        have = self.slots(self._window_of(members))
        used = storage[:, :, :, : self.front + have]
        grown[:, :, :, front - self.front : front + have] = used
        return grown

    def _widen_rings(self, room: int, ends: Tensor) -> None:
        """Move each ring's tokens before ``ends`` to where they are in one with this room."""
        groups = []  # all at once: the number of slots is that of all layers with a window
        for storage, members in self._groups:
            slots = self._slots_of(window := self._window_of(members), self.capacity, room)
            if slots > self.slots(window):
                grown = self._enlarged(storage, members, self.front, slots)
                own = torch.arange(slots, device=ends.device).expand(len(ends), -1)
                self._copy(storage, masks.places(ends, slots), grown, own)
                storage = grown
            groups.append((storage, members))
        self._groups, self.room = groups, room
        self.attach()

    def lost(self, written: int) -> int:
        """Shortest length to which a row can be cut of which so many tokens and nodes have been
        written; 0 if it holds all of them."""
        rings = [(self.slots(window), window) for window in {*self.windows.values()}]
        return max((written - n + window - 1 for n, window in rings if written > n), default=0)

    def widen(self, layer: AttentionLayer, name: str, dtype: torch.dtype) -> None:
        """Hold what a layer calls so, and all that share its buffer, in this dtype."""
        for place, (storage, members) in enumerate(self._groups):
            if (layer.index, name) in members:
                wide = self._new(tuple(storage.shape), dtype, storage.device).copy_(storage)
                self._groups[place] = wide, members
        self.attach()

    # -- slots -------------------------------------------------------------------------------

    def write(self, view: Tensor, slots: Tensor, states: Tensor) -> None:
        """Write states ``(batch, heads, n, dim)`` of tokens ``slots`` ``(batch, n)`` into a layer's
        keys or values ``(batch, heads, front + slots, dim)``, non-finite numbers as 0."""
        finite = states.nan_to_num(0.0, 0.0, 0.0).to(view.dtype)
        if self.traced:  # code writes in place only to what is indexed directly
            slots = self._turned(slots, view.shape[2]).to(view.device) + self.front
            rows = torch.arange(len(slots), device=slots.device)[:, None]
            view[rows, :, slots] = finite.transpose(1, 2)
        else:
            to = self._flat_slots(slots, view.shape[1], view.shape[2], view.device)
            view.view(-1, view.shape[3]).index_copy_(0, to, finite.flatten(0, 2))

    def _flat_slots(self, slots: Tensor, heads: int, size: int, device: torch.device) -> Tensor:
        """Where tokens ``slots`` are in a layer's keys or values, seen as ``(batch * heads * size,
        dim)``: ``(batch * heads * n,)``, made once for the same ``slots``."""
        # One index of whole vectors is several times as fast as one index per dimension.
        if self._flat is None or self._flat[0] is not slots:
            self._flat = slots, {}
        made = self._flat[1]
        if (key := (heads, size, device)) not in made:
            starts = torch.arange(len(slots) * heads, device=slots.device) * size + self.front
            at = starts.view(-1, heads, 1) + self._turned(slots, size)[:, None]
            made[key] = at.flatten().to(device)
        return made[key]

    def _turned(self, slots: Tensor, size: int) -> Tensor:
        """The slots of tokens in a buffer of this size, front slots included."""
        return slots if size == self.front + self.capacity else slots % (size - self.front)

    def move(self, lengths: Tensor, path: Tensor) -> None:
        """Copy the slots ``path`` ``(batch, depth)`` after each row's ``lengths`` ``(batch,)``
        tokens, the root's first, right behind these tokens."""
        accepted = lengths[:, None] + path.to(lengths.device)
        first = lengths[:, None] + torch.arange(path.shape[1], device=lengths.device)
        for storage, _ in self._groups:
            self._copy(storage, accepted, storage, first)

    def _copy(self, source: Tensor, slots: Tensor, into: Tensor, to: Tensor) -> None:
        """Copy tokens ``slots`` ``(batch, n)`` of a buffer to where ``to`` are in another."""
        # Flattened, rows that were dropped come last.
        at = self._flat_slots(slots, source.shape[2], source.shape[3], source.device)
        moved = source.flatten(1, 3).index_select(1, at)
        at = self._flat_slots(to, into.shape[2], into.shape[3], into.device)
        into.flatten(1, 3).index_copy_(1, at, moved)

    # -- as inputs of a graph ----------------------------------------------------------------

    @property
    def members(self) -> tuple[BufferKey, ...]:
        """The layers' keys and values in the order of :meth:`tensors`."""
        return tuple(member for _, members in self._groups for member in members)

    def tensors(self) -> list[Tensor]:
        """The layers' keys and values ``(batch, kv_heads, front + slots, head_dim)``."""
        return [self.layers[index].with_front[name] for index, name in self.members]

    def traced_with(
        self, layers: Sequence[AttentionLayer], tensors: Iterable[Tensor], in_place: bool
    ) -> Self:
        """The same states in these layers and :meth:`tensors`, as a graph sees them; ``in_place``:
        these are the buffers themselves, to which kernels write as eager code does."""
        own = copy.copy(self)
        own.layers, own.traced, own._flat = list(layers), not in_place, None
        for tensor, (index, name) in zip(tensors, self.members):
            own.layers[index].attach(name, tensor, own.front)
        return own

    # -- learned states in front -------------------------------------------------------------

    def set_front(
        self, states: Sequence[tuple[Tensor, Tensor]], own: HeadSelector | None = None
    ) -> None:
        """Put learned keys and values into the last front slots.

        Args:
            states: per layer, keys and values ``(kv_heads, slots, head_dim)``, the same number of
                slots in every layer.
            own: selects this process's heads, given their number; None if it has all heads.

        Raises:
            ValueError: if they do not match the cache's layers, heads and dimensions.
        """
        count = states[0][0].shape[1] if states else 0
        if (front := aligned(count)) > self.front:
            groups = [
                (self._enlarged(one, own, front, self.slots(self._window_of(own))), own)
                for one, own in self._groups
            ]
            self._groups, self.front = groups, front  # together, as slots are counted behind it
            self.attach()
        if len(states) != len(self.layers):
            raise ValueError(f"{len(states)} layers of learned states for {len(self.layers)}.")
        for layer, pair in zip(self.layers, states):
            for name, learned in zip(("keys", "values"), pair):
                have = layer.with_front[name]
                state = learned if own is None else own(learned, have.shape[1])
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
            into, source = (to_device(x, storage.device) for x in zip(*moved))
            used = storage[:, :, :, : self.front + length]
            used.index_copy_(1, into, used.index_select(1, source))
        self.batch_size = len(rows)
        self.attach()

    def repeat(self, rows: Tensor) -> None:
        """Copy rows into buffers of ``len(rows)`` rows; rows may repeat."""
        with torch.inference_mode(False):  # as of zeros()
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
        used = self.front + length  # slices of rings end where these do
        buffers = [
            (storage[:, : self.batch_size, :, :used].clone(), list(members))
            for storage, members in self._groups
        ]
        return {
            "_groups": buffers, "capacity": length if buffers else self.capacity,
            "front": self.front, "room": self.room, "windows": self.windows,
        }  # fmt: skip

    def unpack(self, packed: dict[str, Any]) -> None:
        """Inverse of :meth:`packed`, for new states."""
        vars(self).update(packed)
        self.attach()


def signature(states: Tensor, window: int | None = None) -> Signature:
    """The kind of buffer that holds such keys or values ``(batch, kv_heads, n, head_dim)``."""
    return states.shape[1], states.shape[3], states.dtype, states.device, window


def bounded(learned: Tensor) -> Tensor:
    """Clamp learned values, which may be as large as their dtype allows, so that the product of any
    two is finite: attention computes scores for masked slots too, which must not overflow."""
    most = torch.finfo(learned.dtype).max ** 0.5
    return learned.nan_to_num(0.0, 0.0, 0.0).clamp(-most, most)


def aligned(slots: int) -> int:
    return -(-slots // ALIGNMENT) * ALIGNMENT
