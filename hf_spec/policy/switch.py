"""Whether pruning pays, tried out while decoding.

The early head costs its own time, which small trees in small batches never get back (ProPD, Table
3, batch size 1). So steps with and without pruning are timed in turns, and the better kind goes on.
Knows times and counts; knows nothing of models.
"""

from __future__ import annotations

import statistics
from collections import deque

from hf_spec.policy.memory import alone

#: Steps of one kind in a row while both are tried, and how many of each at first.
TURN, TRIED = 4, 8
#: Steps of each kind after which what they emitted counts half. Pruning costs few tokens, if any,
#: and single steps differ by more.
DOUBT = 64
#: Steps between two looks at the worse kind, doubling from the first to the last.
LOOKS = (64, 512)
#: Steps of a kind whose times are kept. Others delay single ones, hence the median of them.
KEPT = 24
#: Weight of a new step in the mean of emitted tokens, once there are as many steps as 1 / WEIGHT.
WEIGHT = 1 / 64


class _Kind:
    """Steps with pruning, or without."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=KEPT)
        self.tokens = 0.0
        self.steps = 0

    def add(self, seconds: float, tokens: float) -> None:
        self.steps += 1
        self.seconds.append(seconds)
        self.tokens += (tokens - self.tokens) * max(1 / self.steps, WEIGHT)

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return max(statistics.median(self.seconds), 1e-9)


class Switch:
    """Chooses for each step of one batch size, context length and number of rows."""

    def __init__(self) -> None:
        self.kinds = {True: _Kind(), False: _Kind()}
        self._turns = 0  # steps left of trying one kind
        self._trying = True
        self._since, self._look = 0, LOOKS[0]

    @alone
    def prunes(self) -> bool:
        """Whether the step that begins now prunes."""
        tried = {kind: min(one.steps, TRIED) for kind, one in self.kinds.items()}
        if min(tried.values()) < TRIED:
            if self._turns == 0:
                self._turns, self._trying = TURN, tried[True] <= tried[False]
            self._turns -= 1
            return self._trying
        better = self.pays
        if self._turns == 0 and self._since >= self._look:
            self._turns, self._trying = TURN, not better
            self._since, self._look = 0, min(2 * self._look, LOOKS[1])
        if self._turns:
            self._turns -= 1
            return self._trying
        self._since += 1
        return bool(better)

    @property
    @alone
    def pays(self) -> bool | None:
        """Whether pruned steps emit more per second; None before both have been tried."""
        pruned, whole = self.kinds[True], self.kinds[False]
        steps = min(pruned.steps, whole.steps)
        if steps < TRIED:
            return None
        lost = max(1 - pruned.tokens / whole.tokens, 0.0)  # pruning adds none
        kept = 1 - lost * steps / (steps + DOUBT)
        return kept / pruned.median > 1 / whole.median

    @alone
    def observe(self, pruned: bool, seconds: float, tokens: float) -> None:
        """A step took so long, and emitted so many tokens per unfinished row."""
        self.kinds[pruned].add(seconds, tokens)
