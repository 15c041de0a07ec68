"""The likeliest tree of a step, grown from what the step itself expects.

Trees by accuracies know which *rank* tends to be right; here each path counts by the probabilities
of its own tokens, as in EAGLE-2 (Li et al., 2024, section 4.1), and where there is a transition
also by the token before.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The ``count`` likeliest paths of every row, as a tree.

    Exact: a path is never likelier than its parent, so that the likeliest n form a tree, and no
    level has more than n of them. Level by level on the device, all rows at once.

    Args:
        predictions: no narrower than ``count``, unless they hold the whole vocabulary.
        root: ``(batch,)`` tokens.
        count: candidates, from 1.
        depth: deepest candidate, from 1.
    """
    batch, device = len(root), predictions.tokens.device
    depth = min(depth, predictions.distances)
    above, chances = root[:, None].to(device), torch.zeros(batch, 1, device=device)
    # Of all levels, one behind the other; a parent's place is counted in them, too.
    tokens, log_probs = [above], [chances]
    parents, depths = [above.new_full((batch, 1), -1)], [above.new_zeros(batch, 1)]
    first, ragged = 0, min(predictions.known) < depth
    known = torch.tensor(predictions.known, device=device)[:, None, None] if ragged else None
    for distance in range(1, depth + 1):
        # (batch, nodes above, width): never above 0, or a child could stand before its parent
        paths = chances[:, :, None] + predictions.given(distance, above).clamp(max=0)
        if known is not None:
            paths = paths.masked_fill(known < distance, -torch.inf)
        width = paths.shape[-1]
        # Whoever stands among the likeliest at this depth has its ancestors there, too.
        kept = min(count - distance + 1, paths.shape[1] * width)
        if kept < 1:
            break
        chances, at = paths.flatten(1).topk(kept, dim=1)
        parents.append(first + at // width)
        first += above.shape[1]
        above = predictions.tokens[:, distance - 1].gather(1, at % width)
        tokens.append(above)
        log_probs.append(chances)
        depths.append(torch.full_like(at, distance))
    levels = torch.cat(log_probs, 1)
    # Equal chances: the one further up first. Padding goes to the end.
    best = levels.sort(dim=1, descending=True, stable=True).indices[:, : count + 1]
    real = levels.gather(1, best) > -torch.inf
    best = torch.where(real, best, levels.shape[1]).sort(dim=1).values
    valid = best < levels.shape[1]
    best = best.clamp(max=levels.shape[1] - 1)
    place = torch.zeros_like(levels, dtype=torch.long)
    order = torch.arange(best.shape[1], device=device).expand_as(best)
    # Padding must not write over a real place: it writes what is smaller.
    place = place.scatter_reduce(1, best, order * valid, "amax")
    found = torch.cat(parents, 1).gather(1, best)
    made = (
        place.gather(1, found.clamp(min=0)), torch.cat(depths, 1).gather(1, best), valid,
        torch.cat(tokens, 1).gather(1, best) * valid,
        levels.gather(1, best).masked_fill(~valid, -torch.inf),
    )  # fmt: skip
    own_parents, own_depths, valid, own_tokens, chances = (part.to(root.device) for part in made)
    return Grown(TreeBatch.of(own_parents, own_depths, valid), own_tokens, chances)


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
