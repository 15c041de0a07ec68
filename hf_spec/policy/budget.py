"""What drafting may cost, and when something that did not pay is tried again. Knows only numbers.

Predictions may be wrong, so the budget compares results with plain decoding. Its unit is one plain
step: a drafting step gains its emitted tokens per row and costs its time. Until drafting has shown
its value, it may have lost at most

    (1 + 2 / rows) (1 + ln(1 + n / 16))

plain steps in n tokens: with one batch row 3 at first and 10 of 128, with eight rows 1.25 and 4.
The mean of more rows varies less, so that less tells whether drafting pays. Regret of this order in
n is the least with which the better of two choices can be found (Lai and Robbins, "Asymptotically
efficient adaptive allocation rules", 1985).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Plain steps that may be lost at first, with many batch rows and in addition with one, and tokens
#: until that begins to grow slowly.
MANY, ONE, SCALE = 1.0, 2.0, 16
#: Tokens after which losses are forgotten, as the text changes: they fade exponentially.
HORIZON = 1024
#: Largest profit that counts. It carries drafting through bad stretches; more would delay the
#: reaction when acceptance drops within an output.
CREDIT = 4.0
#: What must be left for drafting to resume within a call: a few steps show whether it pays.
RESUME = 1.0
#: Steps until a choice that does not seem to pay is tried again: at first, and at most.
FIRST, LAST = 16, 256


@dataclass
class Budget:
    """The budget of a strategy on a model.

    Attributes:
        lost: plain steps lost against plain decoding; negative for a profit.
        tokens: emitted tokens per row since drafting was last in profit.
        rows: batch rows of the latest step that drafted.
        paused: whether the strategy drafts nothing until enough of the budget is left.
    """

    lost: float = 0.0
    tokens: float = 0.0
    rows: int = 1
    paused: bool = False

    @property
    def left(self) -> float:
        """Plain steps that drafting may still lose."""
        start = MANY + ONE / self.rows
        return start * (1 + math.log1p(self.tokens / SCALE)) - self.lost

    def begin(self) -> None:
        """Called at the start of a call, whose text may differ."""
        self.paused = self.left < 0

    def charge(self, tokens: float, cost: float, rows: int) -> None:
        """Record a step that drafted: its tokens per row, its cost in plain steps, and its rows."""
        self.rows = rows
        self.lost = max(self.lost + cost - tokens, -CREDIT)
        self.tokens = 0.0 if self.lost <= 0 else min(self.tokens + tokens, HORIZON)
        self.paused = self.left < 0

    def wait(self) -> None:
        """Record a step of a pause, as if it emitted one token per row."""
        if self.paused:
            self.tokens = min(self.tokens + 1, HORIZON)
            self.lost *= math.exp(-1 / HORIZON)
            self.paused = self.left < RESUME


@dataclass
class Retry:
    """Tells when to try again what did not seem to pay: after 16 steps, then after twice as many
    each time, at most 256."""

    steps: int = 0  # since it was last tried
    wait: int = FIRST

    def due(self) -> bool:
        """Count a step without it; return whether it is tried in this one."""
        self.steps += 1
        if self.steps < self.wait:
            return False
        self.steps, self.wait = 0, min(2 * self.wait, LAST)
        return True
