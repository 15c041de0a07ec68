"""Trees from accuracies where predictions take no rows. Knows numbers only: no model, no clock.

Heads on the final hidden state predict in every step what they can, so that there is one state, all
rows are candidates, and what a step emits says nothing of what the next one may: the tree of the
likeliest paths is the best one (PPD, Prop. 5.6.1; Medusa, section 2.3.3). How likely a path is, is
either the product of its accuracies or how often it was right.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hf_spec.core.tree import TokenTree
from hf_spec.core.tree_states import TreeStates
from hf_spec.tuning.trees.sparse_tree import Candidates, RankPath, chances_of, checked, grown


def counted_paths(ranks: Iterable[Sequence[int]]) -> list[RankPath]:
    """Rank paths, those that were right most often first, parents before their children.

    Of these places the first n are the best tree of n candidates there is: how often a tree's paths
    were right, summed, is how many candidates it would have had accepted.

    Args:
        ranks: of the right tokens at each place, the nearest first; below 0 where there is none.
    """
    counts: Counter[RankPath] = Counter()
    for row in ranks:
        path: RankPath = ()
        for rank in row:
            if rank < 0:
                break
            path = (*path, int(rank))
            counts[path] += 1
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))


class BareTrees:
    """Builds trees for accuracies; has what :class:`SparseTrees` has.

    Args:
        accuracies: ``(distances, ranks)`` as there.
        max_size: most rows of a step, its nodes, the root included.
    """

    def __init__(self, accuracies: Any, max_size: int):
        self.accuracies = checked(accuracies)
        self.most = len(self.accuracies)
        self.max_size = max_size
        self.candidates = Candidates.search(self.accuracies, self.most, max_size - 1)

    def best(self, size: int) -> TreeStates:
        """The best tree of at most ``size`` rows."""
        count = min(size - 1, len(self.candidates))
        return TreeStates.bare(self.candidates.tree(count), self.most)

    def of(self, paths: Sequence[RankPath], size: int) -> TreeStates:
        """The tree of the first of these paths, of at most ``size`` rows."""
        return TreeStates.bare(TokenTree.in_order(paths[: size - 1]), self.most)

    def static(self, size: int) -> TreeStates:
        """The best tree of at most ``size`` rows if nothing had been measured.

        Of predictions that are right half of the time, a quarter, ... at every distance: 15
        candidates of it are those of the default tree of ``medusa``, but for one.
        """
        guess = np.tile(0.5 ** (1.0 + np.arange(self.accuracies.shape[1])), (self.most, 1))
        found = Candidates.search(guess, self.most, size - 1)
        return TreeStates.bare(found.tree(len(found)), self.most)

    def random(self, size: int, seed: int = 0) -> TreeStates:
        """A tree grown at random, as large as :meth:`best`'s."""
        count = self.best(size).states[-1].tree.num_candidates
        return TreeStates.bare(grown(count, self.most, random.Random(seed)), self.most)

    def tau(self, states: TreeStates) -> float:
        """f(T), tokens that a step emits."""
        return float(chances_of(states.states[-1].tree, self.accuracies)[0].sum())
