"""When a drafter that runs a forward for each level of a tree stops: by what the next level brings
and costs. Knows only numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from hf_spec.core.host_tree import Row
from hf_spec.core.memory import locked, recall
from hf_spec.policy.calibration import Calibration, walk
from hf_spec.policy.tempering import Tempering

#: Steps without drafting until one drafts although that does not seem to pay, as the text changes.
AGAIN = 64


class DraftExit:
    """Decides when to stop drafting. One object serves all calls on a model, in all threads.

    Args:
        depth: depth of the deepest draft token.

    Attributes:
        calibration: corrects the drafter's probabilities.
    """

    def __init__(self, depth: int):
        self.calibration = Calibration(depth)
        self._idle = 0

    @property
    def trust(self) -> list[float]:
        """Terms added to log-probabilities, per distance."""
        return self.calibration.log_factors

    @locked
    def due(self) -> bool:
        """Whether this step should draft although it does not seem to pay, which is rare."""
        self._idle = (self._idle + 1) % AGAIN
        return not self._idle

    def is_worth(
        self, distance: int, paths: Sequence[float], cost: float, present: Sequence[float] = ()
    ) -> bool:
        """Whether to draft the tokens at a distance.

        Args:
            distance: the distance, from 1.
            paths: probability of each sequence that all tokens before are accepted; 0 if it is
                finished.
            cost: tokens that the forward must bring.
            present: probability of each sequence that a draft token at this distance is already in
                the tree and accepted.
        """
        rate = self.calibration.rate(distance)
        present = present or [0.0] * len(paths)
        return sum(max(path * rate - prob, 0.0) for path, prob in zip(paths, present)) > cost

    def levels(self, most: int, rows: int, cost: float) -> int:
        """How many levels to draft, by how often draft tokens at each distance were right.

        Args:
            most: levels that there may be.
            rows: sequences that are not finished.
            cost: tokens that the forward of a level must bring.
        """
        path = 1.0
        for distance in range(1, most + 1):
            if not self.is_worth(distance, [path] * rows, cost):
                return distance - 1
            path *= self.calibration.rate(distance)
        return most

    @locked
    def learn(
        self, trust: Sequence[float], trees: Sequence[Row], emitted: Sequence[Sequence[int]]
    ) -> None:
        """Learn from the tokens that each sequence emitted after its tree was proposed."""
        for tree, tokens in zip(trees, emitted):
            walk(self.calibration, tree.parents, tree.tokens, tree.probs, trust, tokens)


def learned(
    model: Any, key: tuple[Hashable, ...], depth: int, timed: bool, sampled: bool
) -> tuple[DraftExit, Tempering]:
    """What earlier calls have learned about a drafter.

    Args:
        model: the model that it is kept for.
        key: the drafter, its adapter and options.
        depth: depth of the deepest draft token.
        timed: whether drafts may depend on time. If not, they must not depend on earlier calls.
        sampled: whether the call samples: such text is harder to predict.
    """
    if not timed:
        return DraftExit(depth), Tempering()
    key = *key, sampled
    return (
        recall(model, (DraftExit, *key), lambda: DraftExit(depth)),
        recall(model, (Tempering, *key), Tempering),
    )
