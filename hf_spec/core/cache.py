"""The one key-value cache: preallocated buffers, per-row lengths, accepted paths kept in place.

Row ``r`` holds its ``lengths[r]`` accepted tokens in slots ``0 .. lengths[r] - 1``, without padding
and without holes; what a forward writes behind them (candidates) counts only once :meth:`commit`
has kept the accepted part. Nothing is concatenated and nothing is copied but the accepted slots.
All layers of equal shape share one buffer, so that a commit is one gather and one scatter; for
compiled code each has its own.

Slots in *front* of the rows' tokens can hold learned keys and values, the same for every row, for
forwards that ask for them; slot numbers and lengths count from the first token all the same.

Rows that need no more forwards can be *parked*: the others move together in front of them, and the
cache is one of fewer rows until it is asked for all of them again.

An exception may come between any two lines, an interrupt for one. What counts then are the buffers,
the rows' lengths and their places, which change together; :meth:`unpark` makes the rest anew. Slots
behind a row's length never count, so that nothing there has to be undone.

Outside a speculative block the cache serves as an ordinary Transformers cache, as long as all rows
have the same length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from hf_spec.core.transfer import sent

#: Views end on multiples of this many slots: fused attention kernels want aligned mask rows.
ALIGNMENT = 16
#: Slots of the smallest buffers of a cache whose buffers have few sizes.
BUCKET = 256


#: Makes a buffer of a shape, type and device.
Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
#: Gives a process's part of learned states ``(kv_heads, slots, head_dim)``, for its heads.
Share = Callable[[Tensor, int], Tensor]


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer: views ``(batch, kv_heads, capacity, head_dim)`` of a buffer.

    ``with_front`` are the same keys and values with the slots in front of them.
    """

    is_croppable = True

    def __init__(self, cache: TreeCache):
        super().__init__()
        self.cache = cache
        self.appended = 0  # tokens appended outside a block, not yet counted in cache.lengths
        self.with_front: dict[str, Tensor] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Slots for an empty cache's first block."""
        cache = self.cache
        if cache.block is None or not cache.is_empty:
            raise RuntimeError(
                "TreeCache: this layer had no keys when the cache was packed. Start generation "
                "again without `past_key_values`."
            )
        for name, states in (("keys", key_states), ("values", value_states)):
            batch, heads, _, dim = states.shape
            shape = batch, heads, cache.front + cache.block[2], dim
            self.attach(name, zeros(shape, states.dtype, states.device))
        cache.first_block_of(self)

    def attach(self, name: str, with_front: Tensor) -> None:
        """Use these ``keys`` or ``values``, with the slots in front of them."""
        self.with_front[name] = with_front
        setattr(self, name, with_front[:, :, self.cache.front :])
        self.is_initialized = True
        self.dtype, self.device = with_front.dtype, with_front.device

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``(batch, kv_heads, n, head_dim)`` states; return views up to the last slot used.

        Inside a block the slots are those of :meth:`TreeCache.begin`; outside, states are appended.
        Numbers that are not finite become 0: whoever does not see a slot gives it the weight 0,
        which times NaN or infinity would be NaN.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        if cache.block is not None:
            start, slots, end = cache.block
        else:
            start = cache.uniform_length() + self.appended
            slots, end = None, start + key_states.shape[-2]
            cache.reserve(end)
            self.appended += key_states.shape[-2]
        if slots is None:
            stop = start + key_states.shape[-2]
            _write_finite(self.keys[:, :, start:stop], key_states)
            _write_finite(self.values[:, :, start:stop], value_states)
        else:
            rows, slots = cache.on(self.keys.device, "rows"), slots.to(self.keys.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2).nan_to_num(0.0, 0.0, 0.0)
            self.values[rows, :, slots] = value_states.transpose(1, 2).nan_to_num(0.0, 0.0, 0.0)
        if cache.block is not None and cache.shows_front:
            end += cache.front
            return self.with_front["keys"][:, :, :end], self.with_front["values"][:, :, :end]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.cache.max_length + self.appended

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.cache.block is None:
            self.cache.uniform_length()
        return self.get_seq_length() + query_length, 0


class TreeCache(Cache):
    """One preallocated cache for speculative decoding.

    Made by :meth:`pack` after a prefill, or empty: then layers take the shapes of what the first
    block writes.

    Attributes:
        lengths: ``(batch,)`` int64 on the main device, accepted tokens per row.
        host_lengths: the same as a list, so that no device synchronisation is needed.
        capacity: slots allocated per row, those in front left out.
        buckets: whether it is a power of two; see :meth:`use_buckets`.
        front: slots in front of the tokens.
        tokens: the tokens whose states each row holds, where the owner knows and noted them; lets
            a later call tell how far its prompt is in this cache.
    """

    def __init__(self, num_layers: int, batch_size: int, device: torch.device | str):
        super().__init__(layers=[TreeLayer(self) for _ in range(num_layers)])
        self.host_lengths = [0] * batch_size
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.capacity = 0
        self.buckets = False
        self._new: Allocate = zeros
        self.front = 0
        self.shows_front = False
        self.tokens: list[list[int]] | None = None
        self.block: tuple[int, Tensor | None, int] | None = None
        self._offset = 0
        #: Of an empty cache: states for the slots in front, and what gives this process its part.
        self._learned: Sequence[tuple[Tensor, Tensor]] = ()
        self._own: Share | None = None
        self._groups: list[tuple[Tensor, list[tuple[int, str]]]] = []
        #: Lengths below which a row cannot be cut but to nothing: a window dropped what lies there.
        self._floor = [0] * batch_size
        #: While rows are parked, the row that each place of the buffers holds, and parked lengths.
        self._places: list[int] = []
        self._parked_lengths: list[int] = []
        #: What is left of a swap: targets and sources of copies. Done twice they do no harm.
        self._copying: list[tuple[Tensor, Tensor]] = []
        self._copies: dict[tuple[str, torch.device], Tensor] = {}

    # -- packing and unpacking ---------------------------------------------------------------

    @classmethod
    def pack(
        cls,
        source: DynamicCache,
        mask: Tensor | None,
        capacity: int,
        device: torch.device | str,
        front: int = 0,
    ) -> TreeCache:
        """A new cache with what a prefill wrote; see :meth:`take_over`.

        Args:
            device: where ``lengths`` lives.
        """
        cache = cls(len(source.layers), _rows(source), device)
        cache.take_over(source, mask, capacity, front)
        return cache

    def take_over(
        self, source: DynamicCache, mask: Tensor | None, capacity: int, front: int = 0
    ) -> None:
        """Take over what a prefill wrote; ``source`` is emptied layer by layer.

        Args:
            source: a cache of full-attention or sliding-window layers after the prefill.
            mask: ``(batch, seq)`` bool, True for real tokens; None if all are. Padding, wherever
                it stands, is dropped.
            capacity: slots to allocate per row (rounded up).
            front: slots to allocate in front of the tokens (rounded up); see :meth:`set_front`.
        """
        seq = source.get_seq_length()
        order = None
        lengths = [seq] * self.batch_size
        if mask is not None:
            mask = mask.bool()
            lengths = mask.sum(-1).tolist()
            # Real tokens first, in order: slot j of a row takes its j-th real token.
            order = torch.argsort(~mask, dim=-1, stable=True)[:, : max(lengths)]
        self._set_lengths(lengths)
        self.front = _aligned(front)
        states = {
            (index, name): getattr(layer, name)
            for index, layer in enumerate(source.layers)
            if getattr(layer, "keys", None) is not None
            for name in ("keys", "values")
        }
        if any(tensor.shape[2] < seq for tensor in states.values()):
            self._floor = lengths
        self._allocate(states, max(capacity, self.max_length))
        states.clear()
        for own, layer in zip(self.layers, source.layers):
            if not own.is_initialized:
                continue
            for name in ("keys", "values"):
                _copy_in(getattr(own, name), getattr(layer, name), order, seq)
            layer.keys = layer.values = None

    def unpack_into(self, target: DynamicCache, mask: Tensor | None) -> None:
        """Fill a user's ``DynamicCache`` in place, as plain generation would have left it.

        Layers that hold states are left alone: they have not been taken over, or are filled.

        Args:
            target: the cache whose layers get the states; sliding layers keep their window only.
            mask: ``(batch, seq)`` bool over the slots to write, True where a slot holds the row's
                next accepted token; None if all do. Other slots are zero.
        """
        self.count_appended()
        batch = len(self.host_lengths)
        if mask is None:
            seq = self.max_length
            index = None
        else:
            seq = mask.shape[1]
            index = (mask.long().cumsum(-1) - 1).clamp(min=0)
        for own, layer in zip(self.layers, target.layers):
            if not own.is_initialized or not (layer.keys is None or layer.values is None):
                continue
            states = []
            for tensor in (own.keys, own.values):
                if mask is None or index is None:
                    full = tensor[:, :, :seq].clone()
                else:
                    where = index.to(tensor.device)[:, None, :, None]
                    shape = (batch, tensor.shape[1], seq, tensor.shape[3])
                    full = tensor.gather(2, where.expand(shape))
                    full = full * mask.to(tensor.device)[:, None, :, None]
                states.append(full)
            if not layer.is_initialized:
                layer.lazy_initialization(*states)
            if getattr(layer, "is_sliding", False):
                keep = layer.sliding_window - 1
                states = [full[:, :, max(seq - keep, 0) :].contiguous() for full in states]
                layer.cumulative_length = seq
            layer.keys, layer.values = states

    def _allocate(self, sources: dict[tuple[int, str], Tensor], capacity: int) -> None:
        """One buffer per group of tensors of equal shape, dtype and device."""
        self.capacity = self._rounded(capacity)
        groups: dict[tuple, list[tuple[int, str]]] = {}
        for key, tensor in sources.items():
            # What compiled code writes to must not be a part of something: it copies all of that.
            apart = key if self.buckets else None
            signature = (tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device, apart)
            groups.setdefault(signature, []).append(key)
        batch = len(self.host_lengths)
        for (heads, dim, dtype, device, _), members in groups.items():
            # Rows first: a few of them look the same in memory whatever stands behind.
            shape = (batch, len(members), heads, self.front + self.capacity, dim)
            self._groups.append((self._new(shape, dtype, device), members))
        self._attach()

    def _attach(self) -> None:
        for storage, members in self._groups:
            own = storage[: self.batch_size]  # parked rows stand behind
            for view, (index, name) in zip(own.unbind(1), members):
                self.layers[index].attach(name, view)

    def _join(self) -> None:
        """Move what an empty cache's first block wrote into buffers that layers share."""
        made = {
            (index, name): states
            for index, layer in enumerate(self.layers)
            for name, states in layer.with_front.items()
        }
        self._allocate(made, self.capacity)
        while made:
            (index, name), states = made.popitem()
            self.layers[index].with_front[name][:, :, : states.shape[2]] = states
        self._learned = ()

    def reserve(self, slots: int) -> None:
        """Make room for ``slots`` slots per row; grows by doubling, so copies stay rare."""
        if slots <= self.capacity:
            return
        self._resize(self.front, self._rounded(max(slots, 2 * self.capacity)))

    def use_buckets(self, allocate: Allocate | None = None) -> None:
        """From now on have buffers of few sizes, powers of two: compiled code is for one size.

        Args:
            allocate: makes them, with finite numbers in them.
        """
        if self.buckets:
            return
        self.buckets = True
        self._new = allocate or zeros
        capacity = self._rounded(self.capacity)
        if self._groups:
            self._groups = [
                (storage[:, part : part + 1].clone(), [member])
                for storage, members in self._groups
                for part, member in enumerate(members)
            ]
            self._resize(self.front, capacity)

    def release(self) -> list[Tensor]:
        """Its buffers, for another cache; it is not to be used any more."""
        buffers, self._groups = [storage for storage, _ in self._groups], []
        return buffers

    def _rounded(self, slots: int) -> int:
        if not self.buckets:
            return _aligned(slots)
        return max(BUCKET, 1 << (slots - 1).bit_length())

    def buffers(self) -> Iterator[tuple[Tensor, tuple[int, str]]]:
        """Each layer's ``(batch, kv_heads, front + capacity, head_dim)``, and which layer it is,
        and whether ``keys`` or ``values``."""
        for storage, members in self._groups:
            yield from zip(storage[: self.batch_size].unbind(1), members)

    def _resize(self, front: int, capacity: int) -> None:
        """Move everything to buffers of this many slots in front and behind."""
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
        self._attach()

    def set_front(self, states: Sequence[tuple[Tensor, Tensor]], own: Share | None = None) -> None:
        """Put learned keys and values into the last slots in front of the tokens.

        They are seen by forwards whose block was begun with ``front=True``, where the mask allows.

        Args:
            states: per layer, keys and values ``(kv_heads, slots, head_dim)``, the same number of
                slots in every layer.
            own: gives this process's heads of them, for so many; None: it has all.

        Raises:
            ValueError: if they do not have the cache's layers, heads and dimensions; where the
                cache is empty, in the first block.
        """
        count = states[0][0].shape[1] if states else 0
        if _aligned(count) > self.front:
            self._resize(_aligned(count), self.capacity)
        if len(states) != len(self.layers):
            raise ValueError(f"{len(states)} layers of learned states for {len(self.layers)}.")
        if self.is_empty:  # layers take theirs when they know their shapes
            self._learned, self._own = states, own
            return
        for index, pair in enumerate(states):
            self._put_front(index, pair, own)

    def first_block_of(self, layer: TreeLayer) -> None:
        """A layer of an empty cache has its first slots: put its learned states in front."""
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

    @property
    def is_empty(self) -> bool:
        """Whether no block has been committed yet, so that there are no buffers."""
        return not self._groups

    # -- lengths -----------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return len(self.host_lengths)

    @property
    def max_length(self) -> int:
        """Length of the longest row."""
        return max(self.host_lengths)

    def uniform_length(self) -> int:
        """The length that all rows share.

        Raises:
            ValueError: if rows differ, which ordinary (unmasked) use of a cache cannot express.
        """
        if min(self.host_lengths) != self.max_length:
            raise ValueError(
                f"TreeCache holds rows of different lengths {self.host_lengths}: outside "
                "speculative decoding a cache has one length. Pass it to "
                "generate(assistant_strategy=...), or process the rows one by one."
            )
        return self.max_length

    def on(self, device: torch.device, name: str) -> Tensor:
        """``lengths`` (batch,) or ``rows`` (batch, 1) on ``device``, copied at most once each."""
        key = (name, device)
        if key not in self._copies:
            rows = torch.arange(self.batch_size, device=device)[:, None]
            self._copies[key] = rows if name == "rows" else self.lengths.to(device)
        return self._copies[key]

    def _set_lengths(self, lengths: list[int]) -> None:
        self.tokens = None
        self.host_lengths = lengths
        self.lengths = sent(lengths, self.lengths.device)
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] == "rows"}

    @property
    def _appended(self) -> int:
        """Tokens appended outside blocks (by plain generation), as far as all layers have them."""
        return min((one.appended for one in self.layers if one.is_initialized), default=0)

    def count_appended(self) -> None:
        """Count what was appended into the lengths."""
        appended = self._appended
        for layer in self.layers:
            layer.appended = 0
        if appended:
            self._set_lengths([length + appended for length in self.host_lengths])

    # -- a speculative block -----------------------------------------------------------------

    def begin(self, num_nodes: int, offset: int = 0, front: bool = False) -> int:
        """Open a block: the next forward writes ``num_nodes`` nodes behind each row's length.

        Args:
            num_nodes: query rows of the forward.
            offset: slots to leave free before them (nodes written earlier in this step).
            front: let attention see the slots in front of the tokens, too.

        Returns:
            The number of slots that attention will see (the mask's last dimension), without those
            in front.
        """
        self.count_appended()
        self.shows_front, self._offset = front, offset
        end = self.max_length + offset + num_nodes
        self.reserve(end)
        if min(self.host_lengths) == self.max_length:
            start, slots = self.max_length + offset, None
        else:
            steps = torch.arange(offset, offset + num_nodes, device=self.lengths.device)
            start, slots = 0, self.lengths[:, None] + steps
        end = min(_aligned(end), self.capacity)
        self.block = (start, slots, end)
        return end

    def narrow(self, rows: Tensor) -> None:
        """Let only some query rows of the open block come to the layers that have yet to write.

        Each writes the slot that it would have written, so that every layer holds an accepted
        token in the same slot.

        Args:
            rows: ``(batch, kept)`` their places among the block's rows.
        """
        assert self.block is not None
        slots = self.lengths[:, None] + self._offset + rows.to(self.lengths.device)
        self.block = (0, slots, self.block[2])

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        """Close the block: keep the accepted nodes of each row, forget the others.

        Args:
            counts: accepted nodes per row, the root included; 0 keeps none.
            path: ``(batch, depth)`` node indices of the accepted path, root first; entries past
                ``counts`` may be any node. None: the accepted nodes stand first already.
        """
        if self.is_empty:
            self._join()
        if path is not None:
            self._move(path)
        self.block = None
        self._set_lengths([length + count for length, count in zip(self.host_lengths, counts)])

    def _move(self, path: Tensor) -> None:
        depth = path.shape[1]
        uniform = min(self.host_lengths) == self.max_length
        for buffer, _ in self._groups:
            storage = buffer[: self.batch_size, :, :, self.front :]
            nodes = path.to(storage.device)
            if self.batch_size == 1:
                start = self.max_length
                storage[:, :, :, start : start + depth] = storage.index_select(3, nodes[0] + start)
                continue
            rows = self.on(storage.device, "rows")
            lengths = self.on(storage.device, "lengths")[:, None]
            steps = torch.arange(depth, device=storage.device)
            moved = storage[rows, :, :, lengths + nodes]
            if uniform:
                lengths = lengths[:1].expand(self.batch_size, 1)
            storage[rows, :, :, lengths + steps] = moved

    def rollback(self) -> None:
        """Close the block and keep nothing of it."""
        self.block = None

    # -- rows that come from elsewhere -------------------------------------------------------

    @classmethod
    def like(cls, source: TreeCache, batch_size: int) -> TreeCache:
        """A cache of empty rows with the layers, the capacity and the front slots of another."""
        cache = cls(len(source.layers), batch_size, source.lengths.device)
        cache.front, cache.capacity = source.front, source.capacity
        for storage, members in source._groups:
            shape = (batch_size, *storage.shape[1:])
            grown = zeros(shape, storage.dtype, storage.device)
            grown[:, :, :, : source.front] = storage[:1, :, :, : source.front]
            cache._groups.append((grown, list(members)))
        cache._attach()
        return cache

    def replace_row(self, row: int, source: TreeCache) -> None:
        """Let a row hold what the first row of another cache of the same layers holds."""
        self.count_appended()
        length = source.host_lengths[0]
        self.reserve(length)
        for index, layer in enumerate(source.layers):
            for name in layer.with_front:
                states = getattr(layer, name)[0, :, :length]
                getattr(self.layers[index], name)[row, :, :length] = states
        self._floor = [*self._floor[:row], source._floor[0], *self._floor[row + 1 :]]
        lengths = list(self.host_lengths)
        lengths[row] = length
        self._set_lengths(lengths)

    # -- parked rows -------------------------------------------------------------------------

    def park(self, rows: Sequence[int]) -> list[int]:
        """Set rows aside: until :meth:`unpark` the cache is one of the others, at least one.

        In place, without an allocation: as many rows are swapped as stand in the others' way.

        Args:
            rows: places of the rows to park.

        Returns:
            For each place that is left, the place where its row stood before.
        """
        self.count_appended()
        order = list(range(self.batch_size))
        left, parked = len(order) - len(rows), set(rows)
        self._places = self._places or list(order)
        holes = [row for row in range(left) if row in parked]
        behind = [row for row in range(left, len(order)) if row not in parked]
        for hole, row in zip(holes, behind):
            self._swap(hole, row)
            order[hole], order[row] = row, hole
        lengths, away = self.host_lengths, self._parked_lengths
        self.host_lengths, self._parked_lengths = lengths[:left], lengths[left:] + away
        self._refresh()
        return order[:left]

    def unpark(self) -> None:
        """Close the block and take all rows back, in their first order.

        Whatever an exception has left half done is put right.
        """
        lengths, away = self.host_lengths, self._parked_lengths
        self.host_lengths, self._parked_lengths = lengths + away, []
        self._finish_copying()
        for place in range(len(self._places)):
            while (row := self._places[place]) != place:
                self._swap(place, row)
        self._places = []
        self.rollback()
        self._refresh()

    def _swap(self, one: int, other: int) -> None:
        """Exchange two places of the buffers, their slots in use; front slots are all alike."""
        stop = self.front + self.max_length
        used = [storage[:, :, :, self.front : stop] for storage, _ in self._groups]
        copying = [(part[one], part[other]) for part in used]
        copying += [(part[other], part[one].clone()) for part in used]
        places, lengths = list(self._places), list(self.host_lengths)
        for values in (places, lengths):
            values[one], values[other] = values[other], values[one]
        self._copying, self._places, self.host_lengths = copying, places, lengths
        self._finish_copying()

    def _finish_copying(self) -> None:
        while self._copying:
            target, source = self._copying[0]
            target.copy_(source)
            del self._copying[0]

    def _refresh(self) -> None:
        """Make anew what follows from buffers and lengths; layers show as many rows as counted."""
        self._copies = {}
        self._set_lengths(self.host_lengths)
        self._attach()

    # -- the rest of a Transformers cache ----------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the longest row, whatever layers were skipped."""
        return self.max_length + self._appended

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every row (a number <= 0).

        Raises:
            ValueError: on a positive number, one that removes more than the shortest row has, or
                one behind which a sliding window would miss tokens.
        """
        self.count_appended()
        if tokens_to_remove > 0 or -tokens_to_remove > min(self.host_lengths):
            raise ValueError(
                f"crop({tokens_to_remove}): give a number from -{min(self.host_lengths)} (the "
                "shortest row) to 0, the tokens to remove."
            )
        lengths = [length + tokens_to_remove for length in self.host_lengths]
        if tokens_to_remove and any(0 < n < floor for n, floor in zip(lengths, self._floor)):
            raise ValueError(
                f"crop({tokens_to_remove}): a sliding window has dropped tokens of the prompt, so "
                f"that rows of {self.host_lengths} tokens cannot be cut below {self._floor}. "
                "Remove fewer, or start without past_key_values."
            )
        self.truncate(lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep at most ``lengths[row]`` tokens of each row.

        None where a sliding window would miss those that it dropped of a longer prompt.
        """
        self.count_appended()
        kept = [min(have, keep) for have, keep in zip(self.host_lengths, lengths)]
        kept = [n if n >= floor else 0 for n, floor in zip(kept, self._floor)]
        tokens = self.tokens
        self._set_lengths(kept)
        if tokens is not None:
            self.tokens = [row[:n] for row, n in zip(tokens, kept)]

    def reset(self) -> None:
        """Empty every row; the buffers stay."""
        self.block = None
        for layer in self.layers:
            layer.appended = 0
        self._set_lengths([0] * self.batch_size)
        self._floor = self.host_lengths

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order (rows may repeat); parked rows are dropped."""
        self.count_appended()
        places = self._places or list(range(self.batch_size))
        self._places, self._parked_lengths = [], []
        for index, (storage, members) in enumerate(self._groups):
            chosen = storage.index_select(0, indices.to(storage.device))
            self._groups[index] = (chosen, members)
        rows, tokens = indices.tolist(), self.tokens
        self._floor = [self._floor[places[row]] for row in rows]
        self.host_lengths = [self.host_lengths[row] for row in rows]
        self._refresh()
        self.tokens = None if tokens is None else [tokens[row] for row in rows]

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.batch_size).repeat_interleave(repeats)
        self.batch_select_indices(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def row(self, row: int, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Accepted keys and values of one row and layer: ``(kv_heads, length, head_dim)`` views."""
        layer, length = self.layers[layer_idx], self.host_lengths[row]
        return layer.keys[row, :, :length], layer.values[row, :, :length]


def check_packable(cache: Cache) -> None:
    """Raise unless :meth:`TreeCache.pack` can take over this cache.

    Raises:
        ValueError: naming the cache or layer type.
    """
    remedy = "Pass a DynamicCache, the TreeCache of an earlier call, or no past_key_values."
    if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
        kind = "an offloaded cache" if isinstance(cache, Cache) else type(cache).__name__
        raise ValueError(f"past_key_values is {kind}: it cannot hold a tree. {remedy}")
    for layer in cache.layers:
        # Subclasses of the dynamic layer other than the sliding one quantise, index or compress.
        known = type(layer).__name__ in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
        if not known or not (isinstance(layer, DynamicLayer) or "Dummy" in type(layer).__name__):
            static = "Static" in type(layer).__name__
            asks = " For compiled steps give cache_implementation='static' instead." * static
            raise ValueError(
                f"past_key_values has a layer of type {type(layer).__name__}: rows cannot be "
                f"rolled back there. {remedy}{asks}"
            )


def _rows(cache: DynamicCache) -> int:
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    return next(tensor.shape[0] for tensor in keys if tensor is not None)


def bounded(learned: Tensor) -> Tensor:
    """Learned numbers as a model may be given them: products of two of them are finite.

    An adapter's numbers may be any that its dtype holds, and what they make of the scores of rows
    that do not see them must not overflow.
    """
    most = torch.finfo(learned.dtype).max ** 0.5
    return learned.nan_to_num(0.0, 0.0, 0.0).clamp(-most, most)


def _write_finite(target: Tensor, states: Tensor) -> None:
    if torch.compiler.is_compiling():  # it does not trace a view as `out`
        target.copy_(states.nan_to_num(0.0, 0.0, 0.0))
    else:  # in one pass, as cheap as the copy
        torch.nan_to_num(states, 0.0, 0.0, 0.0, out=target)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer."""
    # Zeros, not empty: a masked slot still meets the softmax, where 0 * NaN would be NaN. And no
    # inference tensor, so that a cache made under inference_mode can be continued outside it.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def _aligned(slots: int) -> int:
    return -(-slots // ALIGNMENT) * ALIGNMENT


def _copy_in(target: Tensor, source: Tensor, order: Tensor | None, seq: int) -> None:
    """Copy states ``(batch, heads, kept, dim)``, the last ``kept`` of ``seq`` slots, packed.

    Slots that a sliding layer dropped stay zero: no later query is near enough to see them.
    """
    dropped = seq - source.shape[2]
    if order is None:
        target[:, :, dropped:seq] = source
        return
    slots = order.to(source.device) - dropped
    index = slots.clamp(min=0)[:, None, :, None]
    shape = (source.shape[0], source.shape[1], slots.shape[1], source.shape[3])
    packed = source.gather(2, index.expand(shape))
    target[:, :, : slots.shape[1]] = packed * (slots >= 0)[:, None, :, None]
