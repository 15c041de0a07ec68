"""Grows trees by the probabilities of predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hf_spec.core.device import to_device
from hf_spec.core.shapes import TokenTree
from hf_spec.core.tree import Tree, filled
from hf_spec.target.hidden_states import gather_hidden

# -- Growing the likeliest draft tree, level by level, from what a drafter expands nodes with ------
#
# Paths are ordered by the probabilities of their own tokens, as in EAGLE-2 (Li et al., 2024,
# section 4.1).

#: Distance between log-probabilities of children that are as likely as can be.
EPSILON = 1e-6


class Frontier(NamedTuple):
    """The nodes of a level that is expanded.

    Attributes:
        depth: their depth, 0 for the root.
        tokens: ``(batch, nodes)`` int64
        log_probs: ``(batch, nodes)`` float32, of the paths down to them, likeliest first.
        choices: ``(batch, nodes)`` index of each token among the :class:`Children` it was chosen
            from, of which those of another source come last; 0 for the root.
        parents: ``(batch, nodes)`` index of each token's parent in the frontier before; 0 for the
            root.
    """

    depth: int
    tokens: Tensor
    log_probs: Tensor
    choices: Tensor
    parents: Tensor

    def of_rows(self, rows: Sequence[int]) -> Frontier:
        """That of some of the batch's rows."""
        index = to_device(rows, self.tokens.device)
        return Frontier(self.depth, *(part[index] for part in self[1:]))


class Children(NamedTuple):
    """The likeliest tokens after each node of a frontier.

    Attributes:
        tokens: ``(batch, nodes, width)`` int64, likeliest first, or ``(batch, 1, width)`` for all
            nodes.
        log_probs: ``(batch, nodes, width)`` float32, or ``(batch, 1, width)`` for all nodes.
    """

    tokens: Tensor
    log_probs: Tensor


class Expands(Protocol):
    """What knows how a tree goes on."""

    def expand(self, frontier: Frontier) -> Children | None:
        """The children of a frontier's nodes; None if the tree can be no deeper."""


#: Whether a tree goes on after a frontier.
GoesOn = Callable[[Frontier], bool]


def grow(
    source: Expands, root: Tensor, count: int, depth: int,
    trust: Sequence[float] | Tensor | None = None, expanded: int | None = None,
    goes_on: GoesOn | None = None,
) -> Tensor:  # fmt: skip
    """The ``count`` likeliest paths of every row as a tree, likeliest first.

    Exact if all nodes are expanded: a path is never likelier than its parent, so the likeliest n
    form a tree, and no level has more than n of them. Runs on the device, for all rows at once.

    Args:
        source: expands nodes; no narrower than ``count``, unless by the whole vocabulary.
        root: ``(batch,)`` tokens.
        count: number of draft tokens, from 1.
        depth: depth of the deepest draft token; 0 for the roots alone.
        trust: per depth, a term added to the log-probabilities.
        expanded: number of nodes of each level that are expanded, its likeliest; None for all.
        goes_on: whether to expand a frontier; None: always.

    Returns:
        :meth:`Tree.packed`, which :meth:`Tree.unpacked` reads.
    """
    if trust is not None and not isinstance(trust, Tensor):
        trust = to_device(trust[:depth], root.device) if any(trust[:depth]) else None
    tokens, batch = root[:, None], len(root)
    choices = above = torch.zeros_like(tokens)
    levels = [(torch.zeros_like(tokens, dtype=torch.float32), choices - 1, tokens)]
    first = 0  # node of the frontier's first token
    for level in range(depth):
        path, tokens = levels[-1][0][:, :expanded], levels[-1][2][:, :expanded]
        where = choices[:, :expanded], above[:, :expanded]
        frontier = Frontier(level, tokens, path, *where)
        if goes_on is not None and not goes_on(frontier):
            break
        children = source.expand(frontier)
        if children is None:
            break
        given, width = children.log_probs, children.log_probs.shape[-1]
        if trust is not None:
            given = given + trust[level].to(given)
        # Above 0, a child would stand before its parent; those that would keep their order.
        given = torch.minimum(given, _order(width, str(given.device)) * -EPSILON)
        # A likely path's ancestors are at least as likely, so fewer remain at each depth.
        kept = min(count - level, path.shape[1] * width)
        if kept < 1:
            break
        path, at = (path.to(given)[:, :, None] + given).flatten(1).topk(kept, dim=1)
        above, choices = at // width, at % width
        place = choices if children.tokens.shape[1] == 1 else at
        levels.append((path, above + first, children.tokens.flatten(1).gather(1, place)))
        first += levels[-2][0].shape[1]
    device = levels[-1][0].device
    path, parents, tokens = (
        torch.cat([part.to(device) for part in column], 1) for column in zip(*levels)
    )
    # Ties: the node of smaller depth first.
    best, order = path.sort(dim=1, descending=True, stable=True)
    number = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=device).expand(batch, -1)
    )
    order, best = order[:, : count + 1], best[:, : count + 1]
    above = number.gather(1, parents.gather(1, order).clamp(min=0))
    depths = _depths(tuple(part[0].shape[1] for part in levels), str(device))[order]
    return Tree.packed(above, depths, tokens.gather(1, order), best).to(root.device)


def ranked(source: Expands, shapes: Sequence[Tensor], deepest: int, root: Tensor) -> Tensor:
    """Tokens of the nodes of given trees: a node of rank r gets the r-th likeliest token.

    Args:
        source: expands nodes, wider than the largest rank.
        shapes: the tree of each row, see :func:`levels_of`.
        deepest: depth of the deepest node.
        root: ``(batch,)``

    Returns:
        ``(batch, nodes)`` int64; arbitrary tokens on the padding of smaller trees.
    """
    parents, depths, ranks = shapes
    tokens = root[:, None].expand(parents.shape)
    choices, paths = torch.zeros_like(parents), torch.zeros(parents.shape, device=root.device)
    for depth in range(deepest):  # level by level, of all nodes
        found = source.expand(Frontier(depth, tokens, paths, choices, parents))
        assert found is not None
        order = found.log_probs.argsort(stable=True, dim=-1, descending=True)
        parents, depths, ranks, tokens, choices, paths = (
            part.to(order.device) for part in (parents, depths, ranks, tokens, choices, paths)
        )
        order = order.expand(-1, parents.shape[1], -1)  # of all nodes, where they are alike
        chosen = gather_hidden(order, parents).gather(2, ranks[:, :, None])
        after = gather_hidden(found.tokens.expand(order.shape), parents).gather(2, chosen)
        here = depths == depth + 1
        tokens = torch.where(here, after[:, :, 0], tokens)
        choices = torch.where(here, chosen[:, :, 0], choices)
    return tokens.to(root.device)


@lru_cache(maxsize=1024)
def levels_of(trees: tuple[TokenTree, ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, depths and ranks of the nodes of trees, ``(trees, nodes)``; padding has 0."""
    parents, depths, ranks = (
        filled([[max(n, 0) for n in getattr(tree, name)] for tree in trees])
        for name in ("parents", "depths", "ranks")
    )
    return to_device(parents, device), to_device(depths, device), to_device(ranks, device)


def extended(block: Tree | None, frontier: Frontier) -> tuple[Tree, int]:
    """The drafted nodes, without the root, as a block for forwards level by level.

    Args:
        block: those of earlier levels; None if there are none.
        frontier: a level, not the root's.

    Returns:
        The block with those of the frontier, and the index of the first of these.
    """
    tokens, parents = frontier.tokens, frontier.parents
    batch, count = tokens.shape
    seen = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
    depths, above, first = torch.full_like(tokens, frontier.depth - 1), parents - 1, 0
    if block is not None:
        first = block.num_nodes
        last = block.depths[0].eq(frontier.depth - 2).sum()  # nodes of the level before
        above = first - last + parents
        up = block.ancestors.gather(1, above[:, :, None].expand(-1, -1, first))
        unseen = seen.new_zeros(batch, first, count)
        seen = torch.cat([torch.cat([block.ancestors, unseen], 2), torch.cat([up, seen], 2)], 1)
        depths = torch.cat([block.depths, depths], 1)
        tokens = torch.cat([block.tokens, tokens], 1)
        above = torch.cat([block.parents, above], 1)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    return Tree.of_tensors((tokens, above, depths, valid, seen)), first


@lru_cache(maxsize=256)
def _order(width: int, device: str) -> Tensor:
    """The place of each child among its siblings: integers, which compiled code may keep."""
    return torch.arange(width, device=device)


@lru_cache(maxsize=256)
def _depths(sizes: tuple[int, ...], device: str) -> Tensor:
    """Depth of each node, with nodes ordered by level."""
    depths = [depth for depth, size in enumerate(sizes) for _ in range(size)]
    return to_device(depths, device)
