"""Dropping nodes of a tree in the middle of a forward (ProPD, section 4.1).

The caller says which nodes are likely, and how likely. All rows of a batch keep equally many, as
they run in one forward, so that no row is padded for the fullest one. The subtrees and probes of
dropped nodes are dropped with them. This module knows only trees.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_spec.core.tree import Tree

#: Paths are not told apart below this log-probability.
_LEAST = -1e4


class Pruning(Protocol):
    """Chooses the nodes that deeper layers drop (ProPD, section 4.1)."""

    @property
    def layer(self) -> int:
        """Number of layers that run on all nodes."""

    def likely(self, hidden: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        """The nodes worth keeping, with all their ancestors, and how likely nodes are.

        Args:
            hidden: ``(batch, tokens, hidden)`` after these layers.
            tree: the draft trees.

        Returns:
            ``(batch, tokens)`` bool, and the log-probabilities of the paths to all nodes. For what
            becomes of them see :func:`keep_likely`.
        """


def connected(tree: Tree, wanted: Tensor) -> Tensor:
    """The roots, and the draft tokens of ``wanted`` (batch, tokens) whose ancestors are all in
    it."""
    tree = tree.without_probes
    wanted = wanted & tree.valid
    wanted[:, 0] = True
    return ~(tree.ancestors & ~wanted[:, None, :]).any(-1)


def keep_likely(tree: Tree, likely: Tensor, log_p: Tensor) -> tuple[Tree, Tensor] | None:
    """Keep the likeliest nodes of the trees, equally many in each row.

    Together the rows keep as many as are likely in all of them, rounded up. A row with more likely
    nodes drops the least likely of them, one with fewer keeps its next likeliest. Of a single row,
    all likely nodes are kept and no others.

    Args:
        tree: the tree of each row, with its probes.
        likely: ``(batch, tokens)`` bool, as :func:`connected` returns it.
        log_p: ``(batch, tokens)`` log-probability of each node's path.

    Returns:
        The smaller trees, whose ``slots`` are the nodes' indices in the whole ones, and
        ``(batch, kept nodes and probes)`` int64 such indices. None if no node is dropped.
    """
    valid, size = tree.without_probes.valid, tree.num_tokens
    # Likely nodes first, then valid ones; among equals, parents come before their children.
    rank = torch.where(valid, log_p.clamp(min=_LEAST), 3 * _LEAST)
    rank = torch.where(likely, rank, rank + 2 * _LEAST)
    order = rank.argsort(dim=-1, descending=True, stable=True)
    # The deeper layers' number of nodes: with the step's result, all that the host waits for.
    found = torch.cat([torch.stack([likely.sum(-1), valid.sum(-1)], dim=1), order], dim=1).tolist()
    wanted, real = sum(row[0] for row in found), [row[1] for row in found]
    count = next(n for n in range(1, size + 1) if sum(min(n, most) for most in real) >= wanted)
    if count == size:
        return None
    nodes = order[:, :count].sort(dim=-1).values
    alive = connected(tree, torch.zeros_like(likely).scatter_(1, nodes, True))
    rows, first, counts = nodes, None, None
    if tree.first_probe is not None and tree.probe_counts is not None and tree.probes is not None:
        under = alive.gather(1, tree.parents[:, size:])  # whose probes are kept
        kept_counts = np.take_along_axis(tree.probes.counts, np.array(found)[:, 2 : 2 + count], 1)
        most = int(kept_counts.sum(1).max())
        chosen = torch.argsort(~under, dim=-1, stable=True)[:, :most]
        rows = torch.cat([nodes, size + chosen], dim=1)
        # Probes keep their order, so a group moves forward by the probes dropped before it.
        before = pad(under.long().cumsum(-1), (1, 0))
        first = before.gather(1, tree.first_probe.gather(1, nodes))
        counts = tree.probe_counts.gather(1, nodes)
    kept = tree.valid.gather(1, rows)
    kept[:, :count] = alive.gather(1, nodes)
    smaller = Tree.of_tensors((*_of_rows(tree, rows, nodes, kept), first, counts), tree.group)
    sizes = tuple(min(count, most) - 1 for most in real)
    return smaller.changed(row_sizes=sizes, row_depths=tree.row_depths, slots=nodes), rows


def _of_rows(tree: Tree, rows: Tensor, nodes: Tensor, valid: Tensor) -> Sequence[Tensor]:
    """The tensors of some of a tree's nodes and probes, ``rows``, the first of which have
    tokens."""
    order = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
    place = torch.zeros_like(tree.parents).scatter_(1, nodes, order)
    above = tree.parents.gather(1, rows)
    seen = tree.ancestors.gather(1, rows[:, :, None].expand(-1, -1, tree.num_nodes))
    seen = seen.gather(2, rows[:, None, :].expand(-1, rows.shape[1], -1))
    parents = torch.where(above < 0, above, place.gather(1, above.clamp(min=0)))
    return tree.tokens.gather(1, rows), parents, tree.depths.gather(1, rows), valid, seen
