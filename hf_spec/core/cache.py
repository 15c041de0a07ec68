"""The one key-value cache: preallocated buffers, per-row lengths, accepted paths kept in place.

Row ``r`` holds its ``lengths[r]`` accepted tokens in slots ``0 .. lengths[r] - 1``, without padding
or holes. A forward writes its candidates after them; they become part of the row only when
:meth:`commit` keeps the accepted ones. Nothing is concatenated, and only accepted slots are copied.
All layers of equal shape share one buffer, so a commit is one gather and one scatter. For compiled
code, each layer has its own buffer.

*Front* slots, before the rows' tokens, can hold learned keys and values. They are the same for
every row, and only forwards that ask for them see them. Slot numbers and lengths always count from
the first token.

An exception, such as an interrupt, may occur between any two lines. The buffers and the rows'
lengths change together and stay valid; :meth:`repair` rebuilds the rest. Slots past a row's length
are never read, so nothing there needs to be undone.

Outside a speculative block this is an ordinary Transformers cache, provided that all rows have the
same length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from hf_spec.core.buckets import bucket
from hf_spec.core.transfer import sent

#: Views end on multiples of this many slots: fused attention kernels need aligned masks.
ALIGNMENT = 16
#: Smallest capacity, in slots, of a cache that uses buckets.
BUCKET = 256


#: Allocates a buffer of the given shape, dtype and device.
Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
#: Selects this process's heads from learned states ``(kv_heads, slots, head_dim)``.
Share = Callable[[Tensor, int], Tensor]


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer: views ``(batch, kv_heads, capacity, head_dim)`` of a buffer.

    ``with_front`` holds the same keys and values, preceded by the front slots.
    """

    is_croppable = True

    def __init__(self, cache: TreeCache):
        super().__init__()
        self.cache = cache
        self.appended = 0  # tokens appended outside a block, not yet counted in cache.lengths
        self.with_front: dict[str, Tensor] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate slots for the first block of an empty cache."""
        cache = self.cache
        if cache.block is None or not cache.is_empty:
            raise RuntimeError(
                "TreeCache: this layer had no keys when the cache was packed. Start generation "
                "again without a cache."
            )
        for name, states in (("keys", key_states), ("values", value_states)):
            batch, heads, _, dim = states.shape
            shape = batch, heads, cache.front + cache.block[2], dim
            self.attach(name, zeros(shape, states.dtype, states.device))
        cache.first_block_of(self)

    def attach(self, name: str, with_front: Tensor) -> None:
        """Use this view, front slots included, as ``keys`` or ``values``."""
        self.with_front[name] = with_front
        setattr(self, name, with_front[:, :, self.cache.front :])
        self.is_initialized = True
        self.dtype, self.device = with_front.dtype, with_front.device

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``(batch, kv_heads, n, head_dim)`` states; return views up to the last slot used.

        Inside a block the slots are those of :meth:`TreeCache.begin`; outside, states are appended.
        Non-finite values become 0. A masked slot has weight 0, and 0 times NaN or infinity is NaN.
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
        self.widen(key_states.dtype, value_states.dtype)
        if slots is None:
            stop = start + key_states.shape[-2]
            _write_finite(self.keys[:, :, start:stop], key_states)
            _write_finite(self.values[:, :, start:stop], value_states)
        else:
            for name, states in (("keys", key_states), ("values", value_states)):
                view = self.with_front[name]
                to = cache.flat(slots, view.shape[1], view.shape[2], view.device)
                finite = states.nan_to_num(0.0, 0.0, 0.0).flatten(0, 2)
                view.view(-1, view.shape[3]).index_copy_(0, to, finite.to(view.dtype))
        if cache.block is not None and cache.shows_front:
            end += cache.front
            return self.with_front["keys"][:, :, :end], self.with_front["values"][:, :, :end]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def widen(self, keys: torch.dtype, values: torch.dtype) -> None:
        """Make sure that states of these dtypes can be written without loss.

        What a model writes may change between calls, as with autocast. Like a ``DynamicCache``,
        which concatenates them, the layer then holds all states in the wider dtype.
        """
        for name, dtype in (("keys", keys), ("values", values)):
            have = self.with_front[name].dtype
            if have != dtype and (wider := torch.promote_types(have, dtype)) != have:
                self.cache.widen(self, name, wider)

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

    Create it with :meth:`pack` after a prefill, or empty. In an empty cache, the first block sets
    the layers' shapes.

    Attributes:
        lengths: ``(batch,)`` int64 on the main device, accepted tokens per row.
        host_lengths: the same as a list, which needs no device synchronisation.
        capacity: slots allocated per row, without the front slots.
        buckets: whether the capacity is a power of two; see :meth:`use_buckets`.
        front: number of front slots.
        tokens: the tokens whose states each row holds, if the owner recorded them. A later call
            uses them to find how much of its prompt is cached.
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
        #: Empty cache only: states for the front slots, and the function that selects our heads.
        self._learned: Sequence[tuple[Tensor, Tensor]] = ()
        self._own: Share | None = None
        self._groups: list[tuple[Tensor, list[tuple[int, str]]]] = []
        #: Shortest nonzero length each row can be cut to: a sliding window dropped earlier states.
        self._floor = [0] * batch_size
        #: What :meth:`flat` has made, and for which slots.
        self._flat: tuple[Tensor, dict[tuple[int, int, torch.device], Tensor]] | None = None

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
        """Create a cache from the states of a prefill; see :meth:`take_over`.

        Args:
            device: where ``lengths`` lives.
        """
        cache = cls(len(source.layers), _rows(source), device)
        cache.take_over(source, mask, capacity, front)
        return cache

    def take_over(
        self, source: DynamicCache, mask: Tensor | None, capacity: int, front: int = 0
    ) -> None:
        """Take over the states of a prefill; ``source`` is emptied layer by layer.

        Args:
            source: a cache of full-attention or sliding-window layers after the prefill.
            mask: ``(batch, seq)`` bool, True for real tokens; None if all are. Padding is dropped,
                wherever it is.
            capacity: slots to allocate per row (rounded up).
            front: front slots to allocate (rounded up); see :meth:`set_front`.
        """
        seq = source.get_seq_length()
        order = None
        lengths = [seq] * self.batch_size
        if mask is not None:
            mask = mask.bool()
            lengths = mask.sum(-1).tolist()
            # Real tokens first, in order: slot j of a row gets its j-th real token.
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

        Layers that already hold states are left alone: they were never taken over, or are filled.

        Args:
            target: the cache to fill; sliding layers keep only their window.
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
        """Allocate one buffer per group of tensors of equal shape, dtype and device."""
        self.capacity = self._rounded(capacity)
        groups: dict[tuple, list[tuple[int, str]]] = {}
        for key, tensor in sources.items():
            # Compiled code must not write to part of a buffer: it would copy the whole buffer.
            apart = key if self.buckets else None
            signature = (tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device, apart)
            groups.setdefault(signature, []).append(key)
        batch = len(self.host_lengths)
        for (heads, dim, dtype, device, _), members in groups.items():
            # Layers first: some models view a layer's rows and heads as one dimension.
            shape = (len(members), batch, heads, self.front + self.capacity, dim)
            self._groups.append((self._new(shape, dtype, device), members))
        self._attach()

    def _attach(self) -> None:
        for storage, members in self._groups:
            own = storage[:, : self.batch_size]  # dropped rows come after
            for view, (index, name) in zip(own, members):
                self.layers[index].attach(name, view)

    def _join(self) -> None:
        """Move the states of an empty cache's first block into shared buffers."""
        made = {
            (index, name): states
            for index, layer in enumerate(self.layers)
            for name, states in layer.with_front.items()
        }
        self._allocate(made, self.capacity)
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
        if not self.buckets:
            return _aligned(slots)
        return max(BUCKET, bucket(slots))

    def buffers(self) -> Iterator[tuple[Tensor, tuple[int, str]]]:
        """Each buffer ``(batch, kv_heads, front + capacity, head_dim)`` with its layer index and
        ``keys`` or ``values``."""
        for storage, members in self._groups:
            yield from zip(storage[:, : self.batch_size], members)

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
        self._attach()

    def widen(self, layer: TreeLayer, name: str, dtype: torch.dtype) -> None:
        """Hold a layer's ``keys`` or ``values``, and all that share its buffer, in this dtype."""
        if self.is_empty:  # the layer's first block, not yet in a shared buffer
            layer.attach(name, layer.with_front[name].to(dtype))
            return
        member, groups = (self.layers.index(layer), name), []
        for storage, members in self._groups:
            if member in members:
                wide = self._new(tuple(storage.shape), dtype, storage.device)
                storage = wide.copy_(storage)
            groups.append((storage, members))
        self._groups = groups
        self._attach()

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
        if _aligned(count) > self.front:
            self._resize(_aligned(count), self.capacity)
        if len(states) != len(self.layers):
            raise ValueError(f"{len(states)} layers of learned states for {len(self.layers)}.")
        if self.is_empty:  # layers do not know their shapes yet
            self._learned, self._own = states, own
            return
        for index, pair in enumerate(states):
            self._put_front(index, pair, own)

    def first_block_of(self, layer: TreeLayer) -> None:
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

    @property
    def is_empty(self) -> bool:
        """Whether no block has been committed yet, so that no buffers exist."""
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
            starts = torch.arange(self.batch_size * heads, device=slots.device) * size + self.front
            at = starts.view(-1, heads, 1) + slots[:, None]
            made[key] = at.flatten().to(device)
        return made[key]

    def _set_lengths(self, lengths: list[int]) -> None:
        self.tokens = None
        self.host_lengths = lengths
        self.lengths = sent(lengths, self.lengths.device)

    @property
    def _appended(self) -> int:
        """Tokens appended outside blocks (by plain generation) in all layers."""
        return min((one.appended for one in self.layers if one.is_initialized), default=0)

    def count_appended(self) -> None:
        """Add the appended tokens to the lengths."""
        appended = self._appended
        for layer in self.layers:
            layer.appended = 0
        if appended:
            self._set_lengths([length + appended for length in self.host_lengths])

    # -- a speculative block -----------------------------------------------------------------

    def begin(self, num_nodes: int, offset: int = 0, front: bool = False) -> int:
        """Open a block: the next forward writes ``num_nodes`` nodes after each row's tokens.

        Args:
            num_nodes: query tokens of the forward.
            offset: slots to leave free before them (nodes written earlier in this step).
            front: let attention see the front slots, too.

        Returns:
            The number of slots that attention sees (the mask's last dimension), without the front
            slots.
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
        """Keep only some query tokens of the open block for the layers that have yet to write.

        Each query token keeps its slot, so an accepted token has the same slot in every layer.

        Args:
            rows: ``(batch, kept)`` indices of the kept query tokens in the block.
        """
        assert self.block is not None
        slots = self.lengths[:, None] + self._offset + rows.to(self.lengths.device)
        self.block = (0, slots, self.block[2])

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        """Close the block: keep each row's accepted nodes and discard the others.

        Args:
            counts: accepted nodes per row, the root included; 0 keeps none.
            path: ``(batch, depth)`` node indices of the accepted path, root first; entries past
                ``counts`` may be any node. None if the accepted nodes already come first.
        """
        if self.is_empty:
            self._join()
        if path is not None:
            self._move(path)
        self.block = None
        self._set_lengths([length + count for length, count in zip(self.host_lengths, counts)])

    def _move(self, path: Tensor) -> None:
        lengths = self.lengths[:, None]
        accepted = lengths + path.to(lengths.device)
        kept = lengths + torch.arange(path.shape[1], device=lengths.device)
        for storage, _ in self._groups:
            layers = storage.flatten(1, 3)  # a view, with the dropped rows last
            shape = *storage.shape[2:4], storage.device
            moved = layers.index_select(1, self.flat(accepted, *shape))
            layers.index_copy_(1, self.flat(kept, *shape), moved)

    def rollback(self) -> None:
        """Close the block and discard all of its nodes."""
        self.block = None

    # -- copies ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the slots in use of each buffer, not the layers' views.

        Pickled views would come back as tensors of their own, which do not see what is written
        into the buffers.
        """
        self.count_appended()
        state = dict(vars(self))
        for made_again in ("layers", "_groups", "_new", "_flat"):
            del state[made_again]
        used = self.capacity if self.block else self.max_length
        state["_buffers"] = [
            (storage[:, : self.batch_size, :, : self.front + used].clone(), list(members))
            for storage, members in self._groups
        ]
        # An empty cache's first block is not in shared buffers yet.
        state["_layers"] = [{} if self._groups else layer.with_front for layer in self.layers]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        buffers, layers = state.pop("_buffers"), state.pop("_layers")
        self.__dict__.update(state)
        self._new, self._flat, self._groups = zeros, None, []
        self.layers = [TreeLayer(self) for _ in layers]
        for layer, states in zip(self.layers, layers):
            for name, with_front in states.items():
                layer.attach(name, with_front.clone())
        for part, members in buffers:
            self.capacity = self._rounded(part.shape[3] - self.front)
            shape = (*part.shape[:3], self.front + self.capacity, part.shape[4])
            storage = zeros(shape, part.dtype, part.device)
            storage[:, :, :, : part.shape[3]] = part
            self._groups.append((storage, members))
        self._attach()

    # -- rows --------------------------------------------------------------------------------

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows in this order and drop the others, in place: a row that keeps its index
        is not copied.

        Args:
            rows: the former index of each row; each at most once.
        """
        self.count_appended()
        moved = [(index, row) for index, row in enumerate(rows) if index != row]
        if moved:
            stop = self.front + self.max_length
            for storage, _ in self._groups:
                into, source = (torch.tensor(x, device=storage.device) for x in zip(*moved))
                used = storage[:, :, :, :stop]
                used.index_copy_(1, into, used.index_select(1, source))
        tokens = self.tokens
        self._floor = [self._floor[row] for row in rows]
        self.host_lengths = [self.host_lengths[row] for row in rows]
        self._refresh()
        self.tokens = None if tokens is None else [tokens[row] for row in rows]

    def repair(self) -> None:
        """Close the block, and rebuild what an exception may have left half done."""
        self.rollback()
        self._refresh()

    def _refresh(self) -> None:
        """Rebuild everything derived from the buffers and lengths, such as the layers' views."""
        self._set_lengths(self.host_lengths)
        self._attach()

    # -- the rest of a Transformers cache ----------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the longest row, even if the layer was skipped."""
        return self.max_length + self._appended

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row (a number <= 0).

        Raises:
            ValueError: if the number is positive, removes more tokens than the shortest row has,
                or leaves a sliding window without tokens that it needs.
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
                "Remove fewer, or start without a cache."
            )
        self.truncate(lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep at most ``lengths[row]`` tokens of each row.

        A row becomes empty where a sliding window would need tokens that it has dropped.
        """
        self.count_appended()
        kept = [min(have, keep) for have, keep in zip(self.host_lengths, lengths)]
        kept = [n if n >= floor else 0 for n, floor in zip(kept, self._floor)]
        tokens = self.tokens
        self._set_lengths(kept)
        if tokens is not None:
            self.tokens = [row[:n] for row, n in zip(tokens, kept)]

    def reset(self) -> None:
        """Empty every row; keep the buffers."""
        self.block = None
        for layer in self.layers:
            layer.appended = 0
        self._set_lengths([0] * self.batch_size)
        self._floor = self.host_lengths

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows in this order; rows may repeat."""
        self.count_appended()
        for index, (storage, members) in enumerate(self._groups):
            chosen = storage.index_select(1, indices.to(storage.device))
            self._groups[index] = (chosen, members)
        rows, tokens = indices.tolist(), self.tokens
        self._floor = [self._floor[row] for row in rows]
        self.host_lengths = [self.host_lengths[row] for row in rows]
        self._refresh()
        self.tokens = None if tokens is None else [tokens[row] for row in rows]

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats)
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
    remedy = "Pass a DynamicCache, the TreeCache of an earlier call, or no cache."
    if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
        kind = "an offloaded cache" if isinstance(cache, Cache) else type(cache).__name__
        raise ValueError(f"the given cache is {kind}: it cannot hold a tree. {remedy}")
    for layer in cache.layers:
        # Subclasses of the dynamic layer other than the sliding one quantise, index or compress.
        known = type(layer).__name__ in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
        if not known or not (isinstance(layer, DynamicLayer) or "Dummy" in type(layer).__name__):
            static = "Static" in type(layer).__name__
            asks = " For compiled steps give cache_implementation='static' instead." * static
            raise ValueError(
                f"the given cache has a layer of type {type(layer).__name__}: rows cannot be "
                f"rolled back there. {remedy}{asks}"
            )


def _rows(cache: DynamicCache) -> int:
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    return next(tensor.shape[0] for tensor in keys if tensor is not None)


def bounded(learned: Tensor) -> Tensor:
    """Clamp learned values so that the product of any two is finite.

    An adapter's values may be as large as its dtype allows. Attention computes scores for masked
    slots too, and these scores must not overflow.
    """
    most = torch.finfo(learned.dtype).max ** 0.5
    return learned.nan_to_num(0.0, 0.0, 0.0).clamp(-most, most)


def _write_finite(target: Tensor, states: Tensor) -> None:
    # It does not trace a view as `out`, whose dtype must be that of the input.
    if torch.compiler.is_compiling() or target.dtype != states.dtype:
        target.copy_(states.nan_to_num(0.0, 0.0, 0.0))
    else:  # in one pass, as cheap as the copy
        torch.nan_to_num(states, 0.0, 0.0, 0.0, out=target)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a buffer of zeros."""
    # Not torch.empty: a masked slot has weight 0, and 0 * NaN is NaN. Not an inference tensor: a
    # cache created under inference_mode can then be used outside it.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def _aligned(slots: int) -> int:
    return -(-slots // ALIGNMENT) * ALIGNMENT


def _copy_in(target: Tensor, source: Tensor, order: Tensor | None, seq: int) -> None:
    """Copy and pack states ``(batch, heads, kept, dim)``, the last ``kept`` of ``seq`` slots.

    Slots that a sliding layer dropped stay zero: they are outside every later query's window.
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
