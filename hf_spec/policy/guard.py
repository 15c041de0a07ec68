"""Bounds the loss of speculation against plain decoding with an account of its gains.

The policy relies on predictions, which may be wrong. The account compares results with plain steps,
in units of one plain step: a drafting step earns its emitted tokens and pays its cost. While the
account is empty, steps are plain; they refill it slowly until it allows another attempt. This
module knows only numbers, not models, trees or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Initial balance, in plain steps, that a new strategy may lose: 1.2 % of 128 tokens.
START = 1.5
#: Largest balance. It carries a profitable strategy through bad stretches; a larger one would delay
#: the reaction when acceptance drops within an output.
FULL = 4.0
#: Largest debt, however expensive a step is.
DEBT = 8.0
#: Balance required for another attempt after a setback, and at the start of a new call, whose text
#: may differ.
RETRY, FRESH = 1.0, 0.25
#: Refill per plain step of a pause. It is halved at every setback but the first, down to a limit:
#: pauses last about 20, 40, 80 and then 160 steps while nothing pays. Losses are thus at most
#: 1 / 128 of plain time in the long run, and a strategy that starts to pay is found within 160
#: tokens.
ALLOWANCE, HALVINGS = 1 / 16, 3
#: Setbacks without halving for a strategy with a full account, which pays in general and should
#: resume sooner after a bad stretch.
PATIENCE = 2


@dataclass
class Guard:
    """The account of a strategy on a model.

    Attributes:
        balance: plain steps that it may lose before the next pause.
        setbacks: pauses since it last paid; negative while setbacks cause no halving.
        paused: whether plain steps are taken until the balance is large enough.
    """

    balance: float = START
    setbacks: int = 0
    paused: bool = False

    def begin(self) -> None:
        """Called at the start of a call, whose text may differ."""
        self._reopen(FRESH)

    def book(self, tokens: float, cost: float) -> None:
        """Record a step that drafted: its tokens per row, and its cost in plain steps."""
        self.balance = max(min(self.balance + tokens - cost, FULL), -DEBT)
        if self.balance >= FULL:
            self.setbacks = -PATIENCE
        elif self.balance >= START:
            self.setbacks = min(self.setbacks, 0)
        elif self.balance < 0:
            self.setbacks += 1
            self.paused = True

    def refill(self) -> None:
        """Record a plain step of a pause."""
        self.balance += ALLOWANCE / 2 ** min(self.setbacks - 1, HALVINGS)
        self._reopen(RETRY)

    def _reopen(self, enough: float) -> None:
        if self.balance >= enough:
            self.paused = False
