"""Never much slower than plain decoding: an account of what speculation has brought.

A policy that chooses by promises is as good as these are. The account compares what came with what
plain steps would have taken, in units of one plain step: a step that drafts earns the tokens it
emitted and pays what it cost. While the account is empty steps are plain ones; they refill it
slowly, until there is enough in it for another try. Knows numbers; nothing of models, trees or
clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

#: What a strategy may lose, in plain steps, before it has shown anything: 1.2 % of 128 tokens.
START = 1.5
#: Most that the account holds. What pays outlasts its bad stretches with it; more would delay the
#: answer when acceptance ends in mid-output.
FULL = 4.0
#: Most that it can be in debt: what takes longer is something being compiled rather than a step.
DEBT = 8.0
#: What it must hold for another try after a setback, and at the start of a new call, whose text may
#: be of another kind.
RETRY, FRESH = 1.0, 0.25
#: What a plain step of a pause puts into the account, halved at every setback but the first, down
#: to a limit: pauses of about 20, 40, 80 and then 160 steps where nothing has paid yet. Losses can
#: thus come to 1 / 128 of plain time in the long run, and a strategy that starts to pay is found
#: within 160 tokens.
ALLOWANCE, HALVINGS = 1 / 16, 3
#: Halvings that a strategy with a full account has in hand: it pays in general, and comes back from
#: a bad stretch sooner.
PATIENCE = 2


@dataclass
class Guard:
    """How a strategy has fared on a model.

    Attributes:
        balance: plain steps that it may lose before the next pause.
        setbacks: pauses since it last paid; below 0 while it has patience to spare.
        paused: whether plain steps are taken until the balance is large enough.
    """

    balance: float = START
    setbacks: int = 0
    paused: bool = False

    def begin(self) -> None:
        """A call begins: its text may be of another kind."""
        self._reopen(FRESH)

    def book(self, tokens: float, cost: float) -> None:
        """A step that drafted: its tokens per row, and its cost in plain steps."""
        self.balance = max(min(self.balance + tokens - cost, FULL), -DEBT)
        if self.balance >= FULL:
            self.setbacks = -PATIENCE
        elif self.balance >= START:
            self.setbacks = min(self.setbacks, 0)
        elif self.balance < 0:
            self.setbacks += 1
            self.paused = True

    def refill(self) -> None:
        """A plain step of a pause."""
        self.balance += ALLOWANCE / 2 ** min(self.setbacks - 1, HALVINGS)
        self._reopen(RETRY)

    def _reopen(self, enough: float) -> None:
        if self.balance >= enough:
            self.paused = False
