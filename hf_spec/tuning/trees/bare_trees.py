"""Trees from accuracies if predictions take no step tokens. Knows only numbers: no model, no clock.

Heads on the final hidden state predict in every step, so there is one state, all step tokens but
the root are candidates, and a step does not affect the next one: the tree of the likeliest paths is
the best one (PPD, Prop. 5.6.1; Medusa, section 2.3.3). A path's probability is either the product
of its accuracies or how often it was right.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeStates
from hf_spec.tuning.trees.sparse_tree import Candidates, RankPath, chances_of, checked, grown


def counted_paths(ranks: Iterable[Sequence[int]]) -> list[RankPath]:
    """Rank paths, most often right first, parents before their children.

    On these positions, the first n paths are the best tree of n candidates: the sum of how often a
    tree's paths are right is the number of its accepted candidates.

    Args:
        ranks: ranks of the right tokens at each position, the nearest first; negative if unknown.
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
    """Builds trees for accuracies; has the interface of :class:`SparseTrees`.

    Args:
        accuracies: ``(distances, ranks)``, as in :class:`SparseTrees`.
        max_size: largest number of step tokens: the nodes, the root included.
    """

    def __init__(self, accuracies: Any, max_size: int):
        self.accuracies = checked(accuracies)
        self.most = len(self.accuracies)
        self.max_size = max_size
        self.candidates = Candidates.search(self.accuracies, self.most, max_size - 1)

    def best(self, size: int) -> TreeStates:
        """The best tree of at most ``size`` step tokens."""
        count = min(size - 1, len(self.candidates))
        return TreeStates.bare(self.candidates.tree(count), self.most)

    def of(self, paths: Sequence[RankPath], size: int) -> TreeStates:
        """The tree of the first ``size - 1`` of these paths."""
        return TreeStates.bare(TokenTree.in_order(paths[: size - 1]), self.most)

    def static(self, size: int) -> TreeStates:
        """The best tree of at most ``size`` step tokens without measurements.

        It assumes accuracies of 1/2, 1/4, ... at every distance. Its first 15 candidates are those
        of the default tree of ``medusa``, except for one.
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
