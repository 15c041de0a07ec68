"""The likeliest tree of a step, grown from what the step itself expects.

Trees by accuracies know which *rank* tends to be right; here each path counts by the probabilities
of its own tokens, as in EAGLE-2 (Li et al., 2024, section 4.1), and where there is a transition
also by the token before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.core.tree_states import TreeState
from hf_spec.drafting.drafter import DecodingState, Draft
from hf_spec.drafting.options import CANDIDATES, PROBED
from hf_spec.drafting.predictions import Predictions
from hf_spec.drafting.tree_drafter import TreeDrafter, TreeSource


class Grown(NamedTuple):
    """A batch of trees with their tokens.

    Attributes:
        tree: as many nodes in every row; where nothing is known all but the root are padding.
        tokens: ``(batch, nodes)``
        log_probs: ``(batch, nodes)`` float32, of the path down to each node; 0 for the root, -inf
            for padding.
    """

    tree: TreeBatch
    tokens: Tensor
    log_probs: Tensor


def grow(predictions: Predictions, root: Tensor, count: int, depth: int) -> Grown:
    """The ``count`` likeliest paths of every row, as a tree; its candidates stand best first.

    Exact: a path is never likelier than its parent, so that the likeliest n form a tree, and no
    level has more than n of them. Level by level on the device, all rows at once.

    Args:
        predictions: no narrower than ``count``, unless they hold the whole vocabulary.
        root: ``(batch,)`` tokens.
        count: candidates, from 1.
        depth: deepest candidate, from 1.
    """
    batch, depth = len(root), min(depth, predictions.distances)
    # Never above 0, or a child could stand before its parent.
    after = predictions.after(root)[:, :depth].clamp(max=0)  # (batch, depth, before, width)
    if min(predictions.known) < depth:
        known = torch.tensor(predictions.known, device=after.device)[:, None]
        missing = known <= torch.arange(depth, device=after.device)
        after = after.masked_fill(missing[:, :, None, None], -torch.inf)
    width, device = after.shape[-1], after.device
    # Of all levels, one behind the other: where the parent stands in them, and which token of its
    # distance it is, counted over all distances.
    place = torch.zeros(batch, 1, dtype=torch.long, device=device)
    chances = after.new_zeros(batch, 1)
    log_probs, parents, places, sizes, first = [chances], [place - 1], [place], [1], 0
    for level in range(depth):
        given = after[:, level]
        if given.shape[1] > 1:
            given = given.gather(1, place[:, :, None].expand(-1, -1, width))
        # Whoever stands among the likeliest at this depth has its ancestors there, too.
        kept = min(count - level, sizes[-1] * width)
        if kept < 1:
            break
        chances, at = (chances[:, :, None] + given).flatten(1).topk(kept, dim=1)
        above = at.div(width, rounding_mode="floor")
        place = at - above * width
        log_probs.append(chances)
        parents.append(above + first)
        places.append(place + level * width)
        first += sizes[-1]
        sizes.append(kept)
    # Equal chances: the one further up first.
    best, order = torch.cat(log_probs, 1).sort(dim=1, descending=True, stable=True)
    fewest = torch.arange(order.shape[1], device=device).expand_as(order)
    number = torch.empty_like(order).scatter_(1, order, fewest)
    order, best = order[:, : count + 1], best[:, : count + 1]
    above = number.gather(1, torch.cat(parents, 1).gather(1, order).clamp(min=0))
    tokens = predictions.tokens[:, :depth].flatten(1)
    tokens = tokens.gather(1, torch.cat(places, 1).gather(1, order))
    tokens[:, 0] = root
    made = above, _levels(tuple(sizes), str(device))[order], best > -torch.inf, tokens, best
    own_parents, own_depths, valid, own_tokens, chances = (part.to(root.device) for part in made)
    return Grown(TreeBatch.of(own_parents, own_depths, valid), own_tokens, chances)


@lru_cache(maxsize=256)
def _levels(sizes: tuple[int, ...], device: str) -> Tensor:
    """Which level each node is of, where they stand level by level."""
    levels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return levels.to(device)


def ends(grown: Grown) -> Tensor:
    """``(batch, nodes)`` the chance that a step's accepted path ends at each node."""
    chances = grown.log_probs.exp()
    parents = grown.tree.parents[:, 1:].clamp(min=0)
    return chances.scatter_add(1, parents, -chances[:, 1:])


class AdaptiveTrees(TreeSource):
    """Each step's likeliest tree.

    Args:
        depth: distances that are predicted.
        probes: whether predictions come from probes under the nodes.
        candidates: of every step; None: `CANDIDATES`.
        probed: nodes with probes, those where a step is likeliest to end; 0: all; None: half as
            many as candidates, at least `PROBED`.
    """

    def __init__(
        self, depth: int, probes: bool, candidates: int | None = None, probed: int | None = None
    ):
        self.depth, self.probes = depth, probes
        self.candidates = candidates or CANDIDATES
        self.probed = max(self.candidates // 2, PROBED) if probed is None else probed

    weighs: ClassVar[bool] = True

    @property
    def max_depth(self) -> int:
        return self.depth

    def propose(
        self, drafter: TreeDrafter, state: DecodingState, known: Sequence[int], depth: int
    ) -> Draft:
        if depth == 0:
            alone = TreeState(TokenTree.chain(0), (self.depth * self.probes,))
            return drafter.stand([alone] * state.batch_size, state)
        predictions = drafter.predict(state, depth, self.candidates)
        grown = grow(predictions, state.root, self.candidates, depth)
        probes = drafter.hang(grown.tree, self._ahead(grown)) if self.probes else None
        return Draft(grown.tree, grown.tokens, None, probes)

    def _ahead(self, grown: Grown) -> list[list[int]]:
        """Distances to predict under each node of each row."""
        valid, nodes = grown.tree.valid, grown.tree.num_nodes
        if 0 < self.probed < nodes:
            best = ends(grown).masked_fill(~valid, -1).topk(self.probed, dim=1).indices
            valid = valid & torch.zeros_like(valid).scatter(1, best, True)
        ahead: list[list[int]] = (valid * self.depth).tolist()
        return ahead
