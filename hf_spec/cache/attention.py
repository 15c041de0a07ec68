"""Attention layers of the tree cache, and the buffers that their keys and values lie in."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, Self
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_spec.core.device import bucket, to_device
from hf_spec.core.tree import ring_places

# -- A layer of attention: its keys and values, and its index, as the model sees them --------------


class AttentionLayer(CacheLayerMixin):
    """Keys and values of one layer, which read as those of Transformers' own layers: ``(batch,
    kv_heads, n, head_dim)`` of the tokens that the cache holds, with a :attr:`window` of the last
    ``window - 1``.

    They are in ``views`` ``(batch, kv_heads, slots, head_dim)`` of buffers, by name; with a window
    these are rings, of which :meth:`held` gives tokens in their order. ``with_front`` has the same,
    preceded by the front slots. A layer of indexed attention has ``indexer_keys`` ``(batch, 1,
    slots, index_head_dim)`` there, too, by which it chooses the keys that each query sees.

    Args:
        cache: the ``TreeCache`` that it belongs to, which must outlive its use: it owns the layer,
            and both go as soon as nobody holds the cache.
        index: the layer's.

    Attributes:
        appended: tokens appended outside a block, not yet counted in ``cache.lengths``.
        first: the first token that it holds, if all that came are kept since.
    """

    is_croppable = True
    record_past = False

    def __init__(self, cache: Any, index: int):
        self._cache, self.index = ref(cache), index
        self.appended = self.first = 0
        self.with_front: dict[str, Tensor] = {}
        self.views: dict[str, Tensor] = {}
        self.is_initialized = False

    @property
    def cache(self) -> Any:
        cache = self._cache()
        assert cache is not None
        return cache

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included, if no more are kept; None if all are."""
        return self.cache.states.windows.get(self.index)

    @property
    def is_sliding(self) -> bool:
        return self.window is not None

    def held(self, name: str, first: int, end: int) -> Tensor:
        """A copy of the states ``(batch, heads, n, dim)`` of tokens ``first .. end - 1``."""
        states = self.views[name]
        tokens = torch.arange(first, end, device=states.device)
        return states.index_select(2, tokens % states.shape[2])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate slots for the first block of an empty cache."""
        self._allocate({"keys": key_states, "values": value_states})

    def _allocate(self, first: dict[str, Tensor]) -> None:
        if self.cache.block is None or self.cache.max_length:
            raise RuntimeError(
                f"TreeCache: this layer had no {next(iter(first))} when the cache was packed. "
                "Start generation again without a cache."
            )
        self.cache.states.add(self.index, first)

    def attach(self, name: str, with_front: Tensor, front: int) -> None:
        """Use this view, front slots included, as ``keys``, ``values`` or ``indexer_keys``."""
        self.with_front[name], self.views[name] = with_front, with_front[:, :, front:]
        self.is_initialized = True
        self.dtype, self.device = with_front.dtype, with_front.device

    def detach(self) -> None:
        """Drop the states."""
        self.with_front, self.views, self.is_initialized = {}, {}, False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``(batch, kv_heads, n, head_dim)`` states; return views up to the last slot used.

        Inside a block the slots are those of :meth:`TreeCache.begin`, and states may be without
        padding: ``(1, kv_heads, tokens, head_dim)``; outside, states are appended,
        and of a layer with a window what its queries see is returned in order, as a copy.
        Non-finite values become 0. A masked slot has weight 0, and 0 times NaN or infinity is NaN.
        """
        block = self.cache.block
        if block is not None and block.ragged is not None:
            key_states, value_states = map(block.ragged.pad_heads, (key_states, value_states))
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if block is None:
            if len(key_states) != self.cache.batch_size:
                raise ValueError(
                    f"TreeCache holds {self.cache.batch_size} rows, a forward has "
                    f"{len(key_states)}. For beams or several answers to a prompt repeat them: "
                    "cache.batch_repeat_interleave(number). Or start without a cache."
                )
            block = self.cache.appending(self.appended, key_states.shape[-2])
            self.appended += key_states.shape[-2]
        keys = self._write("keys", key_states, block)
        return keys, self._write("values", value_states, block)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the index ``(batch, n, index_head_dim)`` of the tokens whose keys were written
        last; return that of all slots up to the last one used."""
        states = indexer_key_states[:, None]
        if "indexer_keys" not in self.with_front:
            self._allocate({"indexer_keys": states})
        block = self.cache.block
        if block is None:
            block = self.cache.appending(self.appended - states.shape[2], states.shape[2])
        return self._write("indexer_keys", states, block)[:, 0]

    def _write(self, name: str, new: Tensor, block: Any) -> Tensor:
        """Write states ``(batch, heads, n, dim)`` into a block; see :meth:`update`."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                seen = self._write(name, new, block)
            if new.requires_grad and self.cache.block is None:
                # Gradients flow through what this forward appends; what the cache holds has none.
                return torch.cat([seen[:, :, : -new.shape[2]], new.nan_to_num(0.0, 0.0, 0.0)], 2)
            return seen
        states = self.cache.states
        # What a model writes may change between calls, as with autocast. Like a DynamicCache, which
        # concatenates them, the layer then holds all states in the wider dtype.
        have = self.with_front[name].dtype
        if have != new.dtype and (wider := torch.promote_types(have, new.dtype)) != have:
            states.widen(self, name, wider)
        if block.tree is None and (window := self.window) is not None:
            before = self.held(name, max(block.start - window + 1, 0), block.start)
            last = new[:, :, -self.with_front[name].shape[2] + states.front :]
            self._put(name, last, block.start + new.shape[2] - last.shape[2])
            return torch.cat([before, new.nan_to_num(0.0, 0.0, 0.0).to(before.dtype)], 2)
        if block.slots is not None:
            states.write(self.with_front[name], block.slots, new)
        else:
            self._put(name, new, block.start)
        if block.front:
            return self.with_front[name][:, :, : states.front + block.end]
        return self.with_front[name][:, :, states.front : states.front + block.end]

    def _put(self, name: str, new: Tensor, start: int) -> None:
        """Write states of each row's tokens ``start ..``."""
        view, count = self.views[name], new.shape[2]
        slot = start % view.shape[2]
        if slot + count > view.shape[2]:  # a ring comes round
            tokens = torch.arange(start, start + count, device=view.device)
            self.cache.states.write(self.with_front[name], tokens.expand(len(new), -1), new)
            return
        target = view[:, :, slot : slot + count]
        # It does not trace a view as `out`, whose dtype must be that of the input.
        if torch.compiler.is_compiling() or target.dtype != new.dtype:
            target.copy_(new.nan_to_num(0.0, 0.0, 0.0))
        else:  # in one pass, as cheap as the copy
            torch.nan_to_num(new, 0.0, 0.0, 0.0, out=target)

    # -- read as a layer of Transformers' own ------------------------------------------------

    def _read(self, name: str) -> Tensor | None:
        """The states of the tokens that the cache holds: a view, or a copy where they come round in
        a ring; None if there are none. In an open block those of the longest row, as a model may
        ask for their size: what follows a shorter row's own is arbitrary.

        Raises:
            ValueError: rows have different lengths, which one tensor cannot show, and no block is
                open.
        """
        if name not in self.views:
            return None
        self.cache.uniform_length()
        end, states = self.get_seq_length(), self.views[name]
        first = 0 if self.window is None else max(end - self.window + 1, 0)
        start = first % states.shape[2]
        if start + end - first > states.shape[2]:
            return self.held(name, first, end)
        return states[:, :, start : start + end - first]

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            "a layer of a TreeCache has its rows and lengths in common with the others: call crop, "
            "reset, reorder_cache, batch_select_indices or batch_repeat_interleave of the cache. "
            "To replace keys or values of layers, copy them: DynamicCache(cache)."
        )

    keys: Any = property(lambda self: self._read("keys"), _refuse)
    values: Any = property(lambda self: self._read("values"), _refuse)

    @property
    def indexer_keys(self) -> Tensor | None:
        states = self._read("indexer_keys")
        return None if states is None else states[:, 0]

    @property
    def _sliding_window_tensor(self) -> Tensor | None:
        return None if self.window is None else torch.tensor(self.window, device="cpu")

    crop = reset = reorder_cache = batch_select_indices = batch_repeat_interleave = _refuse
    offload = prefetch = _refuse

    # Before Transformers 5.21, modules with recurrent states read these of a layer.

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        return {0: self.cache.get_conv_state(self.index)}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        return {0: self.cache.get_recurrent_state(self.index)}

    def get_seq_length(self) -> int:
        return self.cache.max_length + self.appended

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.cache.uniform_length()
        first = 0 if self.window is None else max(self.get_seq_length() - self.window + 1, 0)
        return self.get_seq_length() + query_length - first, first


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a buffer of zeros."""
    # Not torch.empty: a masked slot has weight 0, and 0 * NaN is NaN. Not an inference tensor: a
    # cache created under inference_mode can then be used outside it.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


# -- What all attention layers hold: preallocated buffers, and where a block is written to them ----

#: Views end on multiples of this many slots: fused attention kernels need aligned masks.
ALIGNMENT = 16
#: Capacities are multiples of this many slots, or sizes of an :class:`Allocator` from the second
#: number on where code is compiled for each size.
STEP, SMALLEST = 64, 256
#: Layers share a buffer unless it would have more than this share of all slots' bytes, and more
#: than this many bytes: while one cache is moved into another, both hold one buffer's states.
SHARE, LARGE = 1 / 16, 2**23
#: Fewest slots by which a cache grows, unless its limit is known; and those that it then has for
#: a step's nodes behind all tokens.
GROWTH, NODES = 256, 64


class Allocator(Protocol):
    """Allocates buffers for code that is made for each size of them.

    Attributes:
        compiles: whether the code is compiled.
        records: whether it is for their places in memory, too. The numbers of their rows then
            recur: a batch of any number is in a buffer for a power of two.
    """

    compiles: bool
    records: bool

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of finite values."""

    def sized(self, slots: int) -> int:
        """The least capacity that recurs and has so many slots."""

    def spare(self, buffers: Sequence[Tensor], beside: int | None = None) -> None:
        """Take buffers back. ``beside``: bytes of those that the call goes on with; None if it is
        over."""


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
    the last tokens, and :func:`hf_spec.core.tree.ring_places` says which.

    *Front* slots, before the rows' tokens, can hold learned keys and values. They are the same for
    every row, and only forwards that ask for them see them. Slot numbers always count from the
    first token.

    Args:
        layers: the layers, which get views of the buffers.
        allocator: see :meth:`allocate_by`.

    Attributes:
        limit: tokens that no row will exceed; None if that is not known.
    """

    def __init__(
        self, layers: Sequence[AttentionLayer], batch_size: int, allocator: Allocator | None = None
    ):
        self.layers = list(layers)
        self.batch_size = batch_size  # rows in use; those dropped come after them
        self.capacity = 0  # slots per row where all tokens are kept, without the front slots
        self.room = NODES  # nodes of a block that overwrite nothing which their windows need
        self.windows: dict[int, int] = {}  # of layers that keep no more, by their index
        self.front = 0  # number of front slots
        self.traced = False  # whether this is what compiled code sees, see using
        self.limit: int | None = None
        self._groups: list[tuple[Tensor, list[BufferKey]]] = []
        self.allocate_by(allocator)
        #: What :meth:`flat` has made, and for which slots.
        self._flat: tuple[Tensor, dict[tuple[int, int, torch.device], Tensor]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no layer has states yet."""
        return not self._groups

    @property
    def nbytes(self) -> int:
        """Memory of its buffers."""
        return sum(storage.nbytes for storage, _ in self._groups)

    # -- buffers -----------------------------------------------------------------------------

    def slots(self, window: int | None) -> int:
        """Slots per row of layers that see this window, without the front slots."""
        return self._slots_of(window, self.capacity, self.room)

    def _slots_of(self, window: int | None, capacity: int, room: int) -> int:
        if window is None or window not in self.windows.values():
            return capacity
        return min(capacity, -(-(window - 1 + room) // STEP) * STEP)

    def allocate_by(self, allocator: Allocator | None) -> None:
        """Set what allocates buffers for compiled code: their sizes then recur, and one holds all
        layers of equal shape. None: where nothing is compiled."""
        self._allocator, self._recur = allocator, allocator is not None

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        make = zeros if self._allocator is None else self._allocator.allocate
        return make(shape, dtype, device)

    @property
    def _rows_recur(self) -> bool:
        """Whether buffers have powers of two of rows."""
        return self._allocator is not None and self._allocator.records

    def _replace(self, place: int, storage: Tensor) -> Tensor:
        """Hold a group's layers in another buffer from now on; returns the one before."""
        before, members = self._groups[place]
        self._groups[place] = storage, members
        self._attach(storage, members)
        return before

    def _spare(self, buffers: Sequence[Tensor]) -> None:
        """Give buffers back that nothing is in any more."""
        if self._allocator is not None:
            self._allocator.spare(buffers, self.nbytes)

    def allocate(self, kinds: dict[BufferKey, Signature]) -> Iterator[list[BufferKey]]:
        """Allocate buffers for layers' keys and values, one after the other. Gives those of each,
        which the caller fills before the next one is made, and may free what they come from."""
        for (heads, dim, dtype, device, window), members in self._shared(kinds):
            # Layers first: some models view a layer's rows and heads as one dimension.
            rows = bucket(self.batch_size) if self._rows_recur else self.batch_size
            slots = self.front + self.slots(window)
            shape = len(members), rows, heads, slots, dim
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
        Buffers grow by a quarter, or double if sizes recur, so that copies are rare. Where places
        in memory recur, too, a batch that has shrunk moves to a smaller buffer.

        Args:
            ends: gives the tokens and nodes ``(batch,)`` that are written, where windows are.
        """
        self._reserve_slots(slots, nodes, ends)
        rows = self.batch_size
        if self._rows_recur and rows == bucket(rows):
            for place, (storage, _) in enumerate(self._groups):
                if storage.shape[1] > rows:
                    smaller = self._with_rows(storage, rows, storage.dtype)
                    self._spare([self._replace(place, smaller)])

    def _reserve_slots(self, slots: int, nodes: int, ends: Callable[[], Tensor] | None) -> None:
        if slots > self.capacity:
            exactly = self._recur or self.is_empty
            self._spare(self._resize(self._sized(slots if exactly else self.ahead(slots))))
        if self.windows and nodes > self.room:
            assert ends is not None
            self._widen_rings(bucket(nodes), ends())

    def ahead(self, slots: int) -> int:
        """So many slots, and those to allocate with them as they will be needed soon."""
        more = slots + max(slots // 4, GROWTH)
        return more if self.limit is None else max(slots, min(more, self.limit + NODES))

    def _sized(self, slots: int) -> int:
        """The capacity for so many slots."""
        if self._allocator is None:
            return -(-slots // STEP) * STEP
        return max(SMALLEST, self._allocator.sized(slots))

    def release(self) -> list[Tensor]:
        """Return the buffers for use by another cache, if any will have such; this one must not be
        used again."""
        buffers, self._groups = [storage for storage, _ in self._groups], []
        return buffers if self._recur else []

    def rehouse(self, allocator: Allocator | None) -> list[Tensor]:
        """Move everything into buffers of this allocator, see :meth:`allocate_by`; return the old
        buffers. If memory runs out, what has not moved stays where it is, and none are returned."""
        self.allocate_by(allocator)
        try:
            return self._resize(self._sized(self.capacity))
        except torch.OutOfMemoryError:
            return []

    def leave_to_layers(self) -> None:
        """Have the layers alone hold the buffers, which go with the last view of them, unless they
        are to be used again."""
        if not self._recur:
            self._groups = []

    def _resize(self, capacity: int) -> list[Tensor]:
        """Move everything to larger buffers, one after the other; returns those before."""
        left = []
        for place, (storage, members) in enumerate(self._groups):
            slots = self._slots_of(self._window_of(members), capacity, self.room)
            left.append(self._replace(place, self._enlarged(storage, members, self.front, slots)))
        self.capacity = capacity
        return left

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
        groups, freed = [], []  # all at once: the number of slots is that of all with a window
        for storage, members in self._groups:
            slots = self._slots_of(window := self._window_of(members), self.capacity, room)
            if slots > self.slots(window):
                grown = self._enlarged(storage, members, self.front, slots)
                own = torch.arange(slots, device=ends.device).expand(len(ends), -1)
                self._copy(storage, ring_places(ends, slots), grown, own)
                freed.append(storage)
                storage = grown
            groups.append((storage, members))
        self._groups, self.room = groups, room
        self.attach()
        self._spare(freed)

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
                self._spare([self._replace(place, wide)])

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

    def using(self, layers: Sequence[AttentionLayer], tensors: Iterator[Tensor]) -> Self:
        """The same states in these layers and :meth:`tensors`, as a graph sees them. Where nothing
        is compiled, these are the buffers themselves, to which kernels write as eager code does."""
        own = copy.copy(self)
        own.layers, own._flat = list(layers), None
        own.traced = self._allocator is not None and self._allocator.compiles
        for (index, name), tensor in zip(self.members, tensors):
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
        """Keep these rows in this order, in place: ``length`` slots of those that change their
        index are copied. They may repeat as far as there is room."""
        moved = [(index, row) for index, row in enumerate(rows) if index != row]
        for storage, _ in self._groups if moved else ():
            into, source = (to_device(x, storage.device) for x in zip(*moved))
            used = storage[:, :, :, : self.front + length]
            used.index_copy_(1, into, used.index_select(1, source))
        self.batch_size = len(rows)
        self.attach()

    def join(self, other: AttentionStates, longest: int, ends: Tensor, new: Tensor) -> None:
        """Take the rows of another cache, which loses them, behind these.

        Room for a power of two of rows is made, so that few arrivals copy what is there.

        Args:
            longest: tokens of the longest of all rows.
            ends, new: ``(batch,)`` tokens of each of these rows, and of each of the others.

        Raises:
            ValueError: the others are of other layers.
        """
        for kind in "front", "windows", "kinds":
            have, theirs = getattr(self, kind), getattr(other, kind)
            if have != theirs:
                raise ValueError(
                    f"rows with {kind} {theirs} cannot join rows with {kind} {have}: the caches "
                    "must be of the same model and strategy."
                )
        count, known = self.batch_size, (self.limit is not None and other.limit is not None)
        self.limit = max(self.limit or 0, other.limit or 0) if known else None
        self._reserve_slots(longest, other.room, lambda: ends)
        self._reserve_rows(count + other.batch_size, other)
        for storage, members in self._groups:
            window = self._window_of(members)
            for view, (index, name) in zip(storage[:, count:], members):
                source = other.layers[index].with_front[name]
                into = view[: len(source), :, : self.front + longest]
                _copy_rows(source, into, self.front, None if window is None else new)
        self.batch_size = count + other.batch_size
        self.attach()
        freed = other.release()
        for layer in other.layers:
            layer.detach()
        self._spare(freed)

    @property
    def kinds(self) -> dict[BufferKey, tuple[int, ...]]:
        """Heads and their dimension of the layers' keys and values."""
        return {
            (layer.index, name): (view.shape[1], view.shape[3])
            for layer in self.layers
            for name, view in layer.views.items()
        }

    def _reserve_rows(self, rows: int, other: AttentionStates) -> None:
        """Make room for so many rows, some of which are another cache's, in its dtype if this is
        wider. Those that have left make room, too."""
        for place, (storage, members) in enumerate(self._groups):
            theirs = [other.layers[index].with_front[name].dtype for index, name in members]
            dtype, size = storage.dtype, max(storage.shape[1], bucket(rows))
            for one in theirs:
                dtype = torch.promote_types(dtype, one)
            if storage.shape[1] >= rows and dtype == storage.dtype:
                continue
            self._spare([self._replace(place, self._with_rows(storage, size, dtype))])

    def _with_rows(self, storage: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        """A copy of a buffer's rows in one for so many."""
        made = self._new((len(storage), rows, *storage.shape[2:]), dtype, storage.device)
        made[:, : self.batch_size] = storage[:, : self.batch_size]
        return made

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

    def packed(self, length: int, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """What pickles hold: the slots in use of each buffer, not the layers' views, which would
        come back as tensors of their own. ``rows``: which ones, without the front slots; None for
        all, with these."""
        front = self.front if rows is None else 0
        used = slice(self.front - front, self.front + length)  # those of rings end where these do
        index = [*range(self.batch_size)] if rows is None else [*rows]
        buffers = [
            (storage[:, :, :, used].index_select(1, to_device(index, storage.device)), [*members])
            for storage, members in self._groups
        ]
        return {
            "_groups": buffers, "capacity": length if buffers else self.capacity,
            "front": front, "room": self.room, "windows": self.windows,
        }  # fmt: skip

    def unpack(self, packed: dict[str, Any]) -> None:
        """Inverse of :meth:`packed`, for new states."""
        vars(self).update(packed)
        self.attach()


def _copy_rows(source: Tensor, into: Tensor, front: int, lengths: Tensor | None) -> None:
    """Copy rows of keys or values ``(rows, heads, front + slots, dim)`` into others with other
    numbers of slots, of which the tokens have one.

    Args:
        lengths: ``(rows,)`` tokens, of which rings hold the last ones; None where slot i is token
            i's.
    """
    if lengths is None:
        count = min(source.shape[2], into.shape[2])
        into[:, :, :count].copy_(source[:, :, :count])
        return
    into[:, :, :front].copy_(source[:, :, :front])
    tokens = ring_places(lengths, into.shape[2] - front).to(source.device)
    slots = front + tokens % (source.shape[2] - front)
    into[:, :, front:].copy_(source.take_along_dim(slots[:, None, :, None], 2))


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
