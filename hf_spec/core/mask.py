"""Attention masks: that of a tree, and small predicates for what else limits attention.

A predicate answers "may this query token see this key slot?". It is called with three index tensors
that broadcast against each other, ``row`` (batch, 1, 1), ``query`` (1, query, 1) and ``slot``
(1, 1, key), and returns a boolean tensor that broadcasts to (batch, query, key). Slots are places
in the cache, whose row ``r`` holds ``lengths[r]`` accepted tokens followed by the nodes of the
tree. A method that needs another rule adds a predicate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

Predicate = Callable[[Tensor, Tensor, Tensor], Tensor]


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


def prefix(lengths: Tensor) -> Predicate:
    """Slots of the accepted prefix. ``lengths``: (batch,)."""
    return lambda row, query, slot: slot < lengths[row]


def window(size: int, query_positions: Tensor, key_positions: Tensor) -> Predicate:
    """Keys fewer than ``size`` positions back, as in sliding-window attention.

    ``query_positions``: (batch, query), ``key_positions``: (batch, key), both token positions.
    """
    return lambda row, query, slot: query_positions[row, query] - key_positions[row, slot] < size


def chunk(size: int, query_positions: Tensor, key_positions: Tensor) -> Predicate:
    """Keys of the query's own chunk of ``size`` positions, as in chunked attention.

    ``query_positions``: (batch, query), ``key_positions``: (batch, key), both token positions.
    """
    queries, keys = query_positions // size, key_positions // size
    return lambda row, query, slot: queries[row, query] == keys[row, slot]


def build(
    predicate: Predicate, batch: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    """Evaluate a predicate everywhere: (batch, 1, query, key) bool, True = attend."""
    row = torch.arange(batch, device=device)[:, None, None]
    query = torch.arange(queries, device=device)[None, :, None]
    slot = torch.arange(keys, device=device)[None, None, :]
    return predicate(row, query, slot).expand(batch, queries, keys)[:, None]
