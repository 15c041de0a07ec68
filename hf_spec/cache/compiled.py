"""A :class:`TreeCache` as a compiled graph sees it: buffers and slots as tensors.

Nothing here depends on values on the host, such as lengths, so one graph serves all steps over
buffers of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_spec.cache.tree_cache import TreeCache


class Layout(NamedTuple):
    """Where the layers' keys and values are in the buffers; hashable.

    Attributes:
        num_layers: number of layers in the cache.
        members: for each buffer, the layer and ``keys`` or ``values``.
        front: number of front slots.
        shows_front: whether attention sees them.
    """

    num_layers: int
    members: tuple[tuple[int, str], ...]
    front: int
    shows_front: bool

    @classmethod
    def of(cls, cache: TreeCache) -> Layout:
        """The layout of a cache with an open block."""
        members = tuple(member for _, member in cache.states.buffers())
        return cls(len(cache.layers), members, cache.front, cache.shows_front)


class SlotLayer(CacheLayerMixin):
    """Keys and values ``(batch, kv_heads, front + slots, head_dim)`` of one layer.

    Args:
        front: number of front slots, which come first; tokens are not written to them.
        shown: how many of them attention sees: none or all.
        slots: ``(batch, n)`` slots that the forward writes, counted after the front slots.
    """

    def __init__(self, front: int, shown: int, slots: Tensor):
        super().__init__()
        self.hidden, self.slots = front - shown, slots + front
        self.rows = torch.arange(len(slots), device=slots.device)[:, None]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("a layer without keys was asked to keep some.")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``(batch, kv_heads, n, head_dim)`` states; return what attention sees.

        Non-finite values become 0, as in :class:`TreeCache`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, slots = self.rows.to(self.keys.device), self.slots.to(self.keys.device)
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            finite = states.transpose(1, 2).nan_to_num(0.0, 0.0, 0.0)
            kept[rows, :, slots] = finite.to(kept.dtype)  # as wide: see AttentionLayer
        return self.keys[:, :, self.hidden :], self.values[:, :, self.hidden :]

    def get_seq_length(self) -> int:
        """Unknown here; returns the length with which the forward's tokens fill the slots. The
        check of a new graph detects models that compute with it."""
        return int(self.keys.shape[2] - self.hidden - self.slots.shape[1])

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2] - self.hidden, 0


class SlotCache(Cache):
    """The cache of one forward.

    Args:
        layout: layout of the buffers.
        buffers: ``(batch, kv_heads, front + slots, head_dim)`` each.
        lengths: ``(batch,)`` accepted tokens.
        slots: ``(batch, n)`` slots that the forward writes.
    """

    def __init__(self, layout: Layout, buffers: Sequence[Tensor], lengths: Tensor, slots: Tensor):
        self.lengths, self.front, self.shows_front = lengths, layout.front, layout.shows_front
        self._buffers = buffers
        shown = layout.front if layout.shows_front else 0
        layers = [SlotLayer(layout.front, shown, slots) for _ in range(layout.num_layers)]
        for buffer, (index, name) in zip(buffers, layout.members):
            setattr(layers[index], name, buffer)
            layers[index].is_initialized = True
        super().__init__(layers=layers)

    def keep(self, path: Tensor) -> None:
        """Put the nodes of a path, ``(batch, depth)``, into the first slots behind the lengths."""
        if path.shape[1] == 1:  # the root stands there
            return
        steps = torch.arange(path.shape[1], device=path.device)
        for buffer in self._buffers:
            rows = torch.arange(len(path), device=buffer.device)[:, None]
            start = (self.lengths + self.front).to(buffer.device)[:, None]
            moved = buffer[rows, :, start + path.to(buffer.device)]
            buffer[rows, :, start + steps.to(buffer.device)] = moved
