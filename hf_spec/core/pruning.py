"""Dropping nodes of a tree in the middle of a forward (ProPD, section 4.1).

The caller says which nodes are likely, and how likely. All rows of a batch keep equally many, as
they run in one forward, so that no row is padded for the fullest one. The subtrees and probes of
dropped nodes are dropped with them. The result is a smaller tree and the indices of its nodes in
the whole tree. This module knows only shapes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_spec.core.probes import ProbeRows
from hf_spec.core.tree import TreeBatch

#: Paths are not told apart below this log-probability.
_LEAST = -1e4


@dataclass(frozen=True)
class Survivors:
    """What is left of a batch of trees.

    Attributes:
        nodes: ``(batch, kept)`` int64 nodes of the whole tree, ascending.
        rows: ``(batch, kept + kept probes)`` the same for step tokens: nodes and probes.
        tree: the trees of the survivors; a row whose whole tree has fewer nodes has invalid ones.
        probes: the probes under them; None if there were none.
        host_nodes: ``nodes`` as lists.
        counts: candidates that survived in each row.
    """

    nodes: Tensor
    rows: Tensor
    tree: TreeBatch
    probes: ProbeRows | None
    host_nodes: list[list[int]]
    counts: list[int]


def connected(tree: TreeBatch, wanted: Tensor) -> Tensor:
    """The roots, and the nodes of ``wanted`` (batch, nodes) whose ancestors are all in it."""
    wanted = wanted & tree.valid
    wanted[:, 0] = True
    return ~(tree.ancestors & ~wanted[:, None, :]).any(-1)


def survive(
    tree: TreeBatch, likely: Tensor, log_p: Tensor, probes: ProbeRows | None = None
) -> Survivors | None:
    """Keep the likeliest nodes of the trees, equally many in each row.

    Together the rows keep as many as are likely in all of them, rounded up. A row with more likely
    nodes drops the least likely of them, one with fewer keeps its next likeliest. Of a single row,
    all likely nodes are kept and no others.

    Args:
        tree: the tree of each row.
        likely: ``(batch, nodes)`` bool, as :func:`connected` returns it.
        log_p: ``(batch, nodes)`` log-probability of each node's path.
        probes: the probes under the nodes.

    Returns:
        None if no node is dropped.
    """
    # Likely nodes first, then valid ones; among equals, parents come before their children.
    rank = torch.where(tree.valid, log_p.clamp(min=_LEAST), 3 * _LEAST)
    rank = torch.where(likely, rank, rank + 2 * _LEAST)
    order = rank.argsort(dim=-1, descending=True, stable=True)
    sums = torch.stack([likely.sum(-1), tree.valid.sum(-1)], dim=1)
    found = torch.cat([sums, order], dim=1).tolist()  # the step's one wait for the device
    wanted = sum(many for many, *_ in found)
    kept = next(
        size
        for size in range(1, tree.num_nodes + 1)
        if sum(min(size, valid) for _, valid, *_ in found) >= wanted
    )
    if kept == tree.num_nodes:
        return None
    nodes = order[:, :kept].sort(dim=-1).values
    alive = connected(tree, torch.zeros_like(likely).scatter_(1, nodes, True))
    host = [sorted(row[2 : 2 + kept]) for row in found]
    counts = [min(kept, valid) - 1 for _, valid, *_ in found]
    rows, rest = nodes, None
    if probes is not None:
        under = alive.gather(1, probes.anchors)
        most = max(sum(row[node] for node in at) for row, at in zip(probes.sizes, host))
        chosen = _first(under, most)
        rows = torch.cat([nodes, tree.num_nodes + chosen], dim=1)
        # Probes keep their order, so a group moves forward by the probes dropped before it.
        counted = under.long().cumsum(-1)
        before = torch.cat([torch.zeros_like(counted[:, :1]), counted], dim=1)
        first = before.gather(1, probes.first.gather(1, nodes))
        sizes = tuple(tuple(row[n] for n in at) for row, at in zip(probes.sizes, host))
        rest = dataclasses.replace(
            probes, kinds=probes.kinds.gather(1, chosen), first=first, sizes=sizes
        )
    return Survivors(nodes, rows, _subtree(tree, nodes, alive), rest, host, counts)


def _first(marked: Tensor, count: int) -> Tensor:
    """Indices of the marked columns in order, padded with unmarked ones: (batch, count)."""
    return torch.argsort(~marked, dim=-1, stable=True)[:, :count]


def _subtree(tree: TreeBatch, nodes: Tensor, alive: Tensor) -> TreeBatch:
    """The tree of some of its nodes; depths on the host remain upper bounds."""
    size = tree.num_nodes
    place = torch.zeros(nodes.shape[0], size, dtype=torch.long, device=nodes.device)
    place.scatter_(1, nodes, torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes))
    parents = tree.parents.gather(1, nodes)
    moved = place.gather(1, parents.clamp(min=0))
    wide = nodes[:, :, None].expand(-1, -1, size)
    ancestors = tree.ancestors.gather(1, wide)
    ancestors = ancestors.gather(2, nodes[:, None, :].expand(-1, nodes.shape[1], -1))
    return TreeBatch(
        parents=torch.where(parents < 0, parents, moved),
        depths=tree.depths.gather(1, nodes),
        ancestors=ancestors,
        valid=alive.gather(1, nodes),
        row_depths=tree.row_depths,
        row_candidates=tree.row_candidates,
        is_chain=tree.is_chain,
    )
