"""When a drafter that runs a forward for each level of a tree stops: by what the next level brings
and costs. Knows only numbers."""

from __future__ import annotations

from collections.abc import Sequence

from hf_spec.core.memory import locked
from hf_spec.drafting.calibration import Calibration

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
