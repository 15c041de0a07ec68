"""Attention masks as small predicates joined by ``and_`` and ``or_``.

A predicate answers "may this query token see this key slot?". It is called with three index tensors
that broadcast against each other, ``row`` (batch, 1, 1), ``query`` (1, query, 1) and ``slot``
(1, 1, key), and returns a boolean tensor that broadcasts to (batch, query, key). Slots are places
in the cache, whose row ``r`` holds ``lengths[r]`` accepted tokens followed by the nodes of the
tree. A method that needs another rule adds a predicate.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor

Predicate = Callable[[Tensor, Tensor, Tensor], Tensor]


def or_(*predicates: Predicate) -> Predicate:
    """True where any predicate is."""
    return lambda *at: functools.reduce(operator.or_, (one(*at) for one in predicates))


def prefix(lengths: Tensor) -> Predicate:
    """Slots of the accepted prefix. ``lengths``: (batch,)."""
    return lambda row, query, slot: slot < lengths[row]


def tree_ancestors(ancestors: Tensor, offsets: Tensor) -> Predicate:
    """The query's own node and its ancestors; node ``i`` is in slot ``offsets[row] + i``.

    ``ancestors``: (batch, nodes, nodes) bool, ``offsets``: (batch,).
    """
    nodes = ancestors.shape[-1]

    def predicate(row: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        node = slot - offsets[row]
        inside = (node >= 0) & (node < nodes)
        return inside & ancestors[row, query, node.clamp(0, nodes - 1)]

    return predicate


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
