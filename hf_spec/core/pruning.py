"""Dropping nodes of a tree in the middle of a forward (ProPD, section 4.1).

The caller chooses which nodes to drop; their subtrees and probes are dropped with them. The result
is a smaller tree and the indices of its nodes in the whole tree. This module knows only shapes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_spec.core.probes import ProbeRows
from hf_spec.core.tree import TreeBatch


@dataclass(frozen=True)
class Survivors:
    """What is left of a batch of trees.

    Attributes:
        nodes: ``(batch, kept)`` int64 nodes of the whole tree, ascending; batch rows with fewer
            survivors than others are padded with nodes that did not survive.
        rows: ``(batch, kept + kept probes)`` the same for step tokens: nodes and probes.
        tree: the trees of the survivors; padding is marked invalid.
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


def survive(tree: TreeBatch, alive: Tensor, probes: ProbeRows | None = None) -> Survivors | None:
    """Remove the nodes that are not alive from the trees.

    Args:
        tree: the tree of each row.
        alive: ``(batch, nodes)`` bool, as :func:`connected` returns it.
        probes: the probes under the nodes.

    Returns:
        None if no batch row changes.
    """
    flags = alive.tolist()  # the step's one wait for the device
    counts = [sum(row) for row in flags]
    kept = max(counts)
    if kept == tree.num_nodes:
        return None
    nodes = _first(alive, kept)
    host = [sorted(range(len(row)), key=lambda n: not row[n])[:kept] for row in flags]
    rows, rest = nodes, None
    if probes is not None:
        under = alive.gather(1, probes.anchors)
        most = max(
            sum(size for size, on in zip(row, held) if on) for row, held in zip(probes.sizes, flags)
        )
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
    return Survivors(nodes, rows, _subtree(tree, nodes, alive), rest, host, [n - 1 for n in counts])


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
