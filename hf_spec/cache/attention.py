"""A layer of attention: its keys and values, and its index, as the model sees them."""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


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
    """

    is_croppable = True
    record_past = False

    def __init__(self, cache: Any, index: int):
        self._cache, self.index = ref(cache), index
        self.appended = 0  # tokens appended outside a block, not yet counted in cache.lengths
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
        window: int | None = self.cache.states.windows.get(self.index)
        return window

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

        Inside a block the slots are those of :meth:`TreeCache.begin`; outside, states are appended,
        and of a layer with a window what its queries see is returned in order, as a copy.
        Non-finite values become 0. A masked slot has weight 0, and 0 times NaN or infinity is NaN.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        block = self.cache.block
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
        a ring; None if there are none.

        Raises:
            ValueError: rows have different lengths, which one tensor cannot show.
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
        if self.cache.block is None:
            self.cache.uniform_length()
        first = 0 if self.window is None else max(self.get_seq_length() - self.window + 1, 0)
        return self.get_seq_length() + query_length - first, first


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a buffer of zeros."""
    # Not torch.empty: a masked slot has weight 0, and 0 * NaN is NaN. Not an inference tensor: a
    # cache created under inference_mode can then be used outside it.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)
