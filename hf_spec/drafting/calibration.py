"""Calibration of predicted probabilities, learned while decoding, and when it says to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hf_spec.core.host_tree import HostTree
from hf_spec.core.memory import locked

Array = np.ndarray[Any, np.dtype[Any]]

#: Weight of a new prediction, and number of correct predictions that the prior stands for.
ALPHA, GUESSED = 1 / 256, 8.0
#: Bounds of the factors; far outside, predictions carry no information.
LEAST, MOST = 0.02, 4.0
#: Steps without drafting until one drafts although that does not seem to pay, as the text changes.
AGAIN = 64


@dataclass
class Calibration:
    """Per distance, how often predictions were right, and how often they were expected to be.

    A prediction counts if all tokens before it were right. The expectation is the probability that
    one of the draft tokens there follows. The prior stands for some correct predictions.

    Args:
        depth: number of distances.
    """

    depth: int
    expected: Array = field(init=False)
    hits: Array = field(init=False)
    trials: Array = field(init=False)

    def __post_init__(self) -> None:
        self.expected, self.hits, self.trials = (np.full(self.depth, GUESSED) for _ in range(3))

    def observe(self, distance: int, expected: float, hit: bool) -> None:
        """Learn from a prediction at a distance, from 1."""
        news = (self.expected, expected), (self.hits, float(hit)), (self.trials, 1.0)
        for sums, value in news:
            sums[distance - 1] += value - ALPHA * sums[distance - 1]

    def rate(self, distance: int) -> float:
        """How often one of the draft tokens at a distance was right."""
        return float(self.hits[distance - 1] / self.trials[distance - 1])

    @property
    def log_factors(self) -> list[float]:
        """Per distance, the term added to the log-probabilities."""
        factors = (self.hits / np.maximum(self.expected, 1e-9)).clip(LEAST, MOST)
        found: list[float] = np.log(factors).tolist()
        return found

    @locked
    def learn(
        self, trees: HostTree, trust: Sequence[float], emitted: Sequence[Sequence[int]]
    ) -> None:
        """Learn from the tokens that each sequence emitted after its tree was proposed.

        Args:
            trees: the proposed trees.
            trust: log-factors that their probabilities contain, per distance.
            emitted: the tokens that followed in each row; the first is that of distance 1.
        """
        columns = trees.parents.tolist(), trees.tokens.tolist(), trees.probs.tolist()
        for parents, tokens, chances, following in zip(*columns, emitted):
            self.walk(parents, tokens, chances, trust, following)

    def walk(
        self, parents: Sequence[int], tokens: Sequence[int], chances: Sequence[float],
        trust: Sequence[float], emitted: Sequence[int],
    ) -> None:  # fmt: skip
        """:meth:`learn` of one row, given its nodes; ``chances`` are of whole paths."""
        node = 0
        for distance, token in enumerate(emitted, 1):
            below = [n for n in range(1, len(parents)) if parents[n] == node and chances[n] > 0]
            if not below or chances[node] <= 0:
                return
            share = sum(chances[n] for n in below) / chances[node] / math.exp(trust[distance - 1])
            hit = [n for n in below if tokens[n] == token]
            self.observe(distance, min(share, 1.0), bool(hit))
            if not hit:
                return
            node = hit[0]


class DraftExit:
    """Decides when a drafter that runs a forward for each level of a tree stops: by what the next
    level brings and costs. One object serves all calls on a model, in all threads.

    Args:
        depth: depth of the deepest draft token.
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
