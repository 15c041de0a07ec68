"""Attention masks: that of a tree, and what else limits attention, to be joined by ``&``.

Each is ``(batch, 1, query, key)`` bool, True = attend. Keys are slots of the cache, whose row ``r``
holds ``lengths[r]`` accepted tokens followed by the nodes of the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def tree(ancestors: Tensor, lengths: Tensor, keys: int) -> Tensor:
    """The mask of a tree's nodes: each sees its row's prefix, itself and its ancestors.

    Args:
        ancestors: ``(batch, query, nodes)`` bool.
        lengths: ``(batch,)`` tokens of the prefix; node ``i`` is in slot ``lengths[row] + i``.
        keys: number of slots.

    Returns:
        ``(batch, 1, query, keys)`` bool, True = attend.
    """
    count, nodes = ancestors.shape[1:]
    # A column for the prefix, one for each node and one for what is behind them.
    seen = pad(pad(ancestors, (1, 0), value=True), (0, 1))
    slots = torch.arange(1, keys + 1, device=lengths.device) - lengths[:, None]
    column = slots.clamp(0, nodes + 1)[:, None].expand(-1, count, -1)
    return seen.gather(2, column)[:, None]


def window(size: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Keys fewer than ``size`` positions back, as in sliding-window attention; both are token
    positions, ``(batch, query)`` and ``(batch, key)``."""
    return queries[:, None, :, None] - keys[:, None, None] < size


def chunk(size: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Keys of the query's own chunk of ``size`` positions, as in chunked attention; positions as
    for :func:`window`."""
    return queries[:, None, :, None] // size == keys[:, None, None] // size
