"""Never much slower than plain decoding: drafts only while drafting pays.

Before each step the loop asks :meth:`Controller.speculate`, after it it reports what the step
emitted. The controller keeps an account in units of one plain step: a speculative step earns the
tokens it emitted and pays what it cost. While the account is empty the loop takes plain steps,
which refill it slowly, until there is enough in it for another try. Knows step times and counts;
knows nothing of models, trees or tokens. docs/controller.md has the simulations behind the numbers.
"""

from __future__ import annotations

import statistics
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_spec.core.stats import SpecStats
from hf_spec.drafting.options import StrategyOptions

#: What a strategy may lose, in plain steps, before it has shown anything: 1.2 % of 128 tokens. At
#: tau 1.8 and a step cost of 1.2, bad luck uses it up in one first call of 16.
START = 1.5
#: Most that the account holds. What pays outlasts its bad stretches with it (one later call of 40
#: pauses, in the same setting); more would delay the answer when acceptance ends in mid-output.
FULL = 4.0
#: Most that it can be in debt: what takes longer is something being compiled rather than a step.
DEBT = 8.0
#: Halvings that a strategy with a full account has in hand: it pays in general, and comes back from
#: a bad stretch after about 5, 10 and 20 steps. Text on which it suddenly fails costs more for it.
PATIENCE = 2
#: What the account must hold for another try after a setback, ...
RETRY = 1.0
#: ... and for one at the start of a new call, whose text may be of another kind.
FRESH = 0.25
#: What a plain step of a pause puts into the account, halved at every setback but the first, down
#: to a limit: pauses of about 20, 40, 80 and then 160 steps where nothing has paid yet. Losses can
#: thus come to 1 / 128 of plain time in the long run, and a strategy that starts to pay is found
#: within 160 tokens.
ALLOWANCE, HALVINGS = 1 / 16, 3
#: Steps of a kind whose costs are kept. The median is taken of them, since a busy machine delays
#: single steps; it is trusted from the second on, since a first step warms something up.
KEPT, TRUSTED = 5, 2
#: Speculative steps behind plain ones that are compared with these. A machine may be twice as fast
#: a moment later, so that times from further apart say little about what a step costs.
PAIRED = 2
#: Speculative steps between two looks at a plain step's cost, doubling from the first to the last:
#: the first looks may have met a cold machine, and costs shift as the context grows.
LOOKS = (8, 128)
#: Tokens per step above which looks can wait: speculation then pays wherever a step costs less
#: than three plain ones.
CLEAR = 3.0
#: No step takes less; clocks may be coarse.
TICK = 1e-9
#: Weight of the newest step in the averages that are reported.
WEIGHT = 1 / 16

#: Kind of a step: rows of its forward in powers of two, and forwards made while drafting.
Kind = tuple[int, int]
PLAIN: Kind = (1, 0)
#: Stands for drafting that found nothing, which a plain step follows.
NOTHING: Kind = (0, 0)


def switched_on(options: StrategyOptions, do_sample: bool) -> bool:
    """What the option ``fallback`` means for a call.

    ``auto`` stays off where what is emitted depends on which steps draft, since the controller's
    decisions depend on time: sampling candidates draws random numbers of its own, and typical
    acceptance is lossy where it drafts only.
    """
    if options.fallback != "auto":
        return bool(options.fallback)
    return not (do_sample and options.samples) and options.acceptance != "typical"


@dataclass
class Costs:
    """What steps take with one batch size, context length and device.

    Attributes:
        age: speculative steps since a plain step was timed.
        look: the age at which the next is due.
    """

    age: int = 0
    look: int = LOOKS[0]
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _relative: dict[Kind, deque[float]] = field(default_factory=dict)

    def lent(self) -> Costs:
        """What stands in for the costs of a like setting until there are some of its own."""
        relative = {kind: deque(known, maxlen=KEPT) for kind, known in self._relative.items()}
        return Costs(_plain=deque(list(self._plain)[-TRUSTED:], maxlen=KEPT), _relative=relative)

    def time_plain(self, seconds: float) -> None:
        """A plain step, whether it was taken for its own sake or because no draft was found."""
        self._plain.append(seconds)
        if self.plain is not None:
            if self.age >= self.look:
                self.look = min(2 * self.look, LOOKS[1])
            self.age = 0

    @property
    def plain(self) -> float | None:
        """Seconds of a plain step; None if they are not known yet."""
        return _median(self._plain)

    def add(self, kind: Kind, cost: float) -> None:
        """A step of this kind took as long as ``cost`` plain steps."""
        self._relative.setdefault(kind, deque(maxlen=KEPT)).append(cost)

    def of(self, kind: Kind) -> float | None:
        """Plain steps that a step of this kind takes; None if that is not known yet."""
        return _median(self._relative.get(kind, ()))


@dataclass
class Account:
    """How a strategy has fared on a model.

    Attributes:
        balance: plain steps that it may lose before the next pause.
        setbacks: pauses since it last paid; below 0 while it has patience to spare.
        paused: whether plain steps are taken until the balance is large enough.
        tokens: emitted tokens per row of its steps, averaged; None before the first.
        cost: plain steps that one of its steps takes, averaged; None while unknown.
    """

    balance: float = START
    setbacks: int = 0
    paused: bool = False
    tokens: float | None = None
    cost: float | None = None

    def reopen(self, enough: float) -> None:
        """End a pause if there is enough in the account."""
        if self.balance >= enough:
            self.paused = False

    def book(self, tokens: float, cost: float) -> None:
        """A speculative step: its tokens per row, and its cost in plain steps."""
        self.cost = _average(self.cost, cost)
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
        self.reopen(RETRY)


class Controller:
    """Decides for one call which steps draft. See :func:`controller_for`.

    Args:
        stats: the call's statistics; plain steps chosen are counted there.
        costs: what is known of step times; updated.
        account: how the strategy has fared; updated.
        enabled: if False, every step drafts and nothing is measured.
        known: costs by setting, where the call may come to another one.
    """

    def __init__(
        self, stats: SpecStats, costs: Costs, account: Account, enabled: bool = True,
        known: dict[Hashable, Costs] | None = None,
    ):  # fmt: skip
        self.known: dict[Hashable, Costs] = {} if known is None else known
        self.stats = stats
        self.costs = costs
        self.account = account
        self.enabled = enabled
        self._drafts = True
        #: Seconds of the latest plain steps in a row, and speculative steps since.
        self._plain: deque[float] = deque(maxlen=KEPT)
        self._since = 0
        if enabled:
            account.reopen(FRESH)

    def speculate(self) -> bool:
        """Whether the step that begins now drafts."""
        self._before = self.stats.draft_seconds, self.stats.num_draft_forwards
        self._drafts = not self.enabled or not (self.account.paused or self._look_is_due())
        self.stats.num_fallback_steps += not self._drafts
        return self._drafts

    def _look_is_due(self) -> bool:
        """Whether a plain step is due so that its cost is known."""
        tokens, costs = self.account.tokens, self.costs
        if tokens is None or tokens > CLEAR:
            return costs.age >= LOOKS[1]
        return costs.plain is None or costs.age >= costs.look

    def observe(self, rows: int, emitted: Sequence[int], seconds: float) -> None:
        """The step is over.

        Args:
            rows: rows of its forward per batch row: nodes of the tree, and probes.
            emitted: tokens per batch row; none for a row that was finished before.
            seconds: that it took.
        """
        if not self.enabled:
            return
        drafting = self.stats.draft_seconds - self._before[0]
        kind = (rows.bit_length(), self.stats.num_draft_forwards - self._before[1])
        plain = max(seconds - drafting, TICK)
        if kind == PLAIN:
            self._time_plain(plain)
        if not self._drafts:
            if self.account.paused:
                self.account.refill()
            return
        live = [count for count in emitted if count]
        tokens = sum(live) / max(len(live), 1)
        self.account.tokens = _average(self.account.tokens, tokens)
        if kind == PLAIN:
            # Drafting that found nothing costs its own time on top of the plain step behind it.
            self.costs.add(NOTHING, drafting / plain)
            cost = self.costs.of(NOTHING)
        else:
            self._time(kind, seconds)
            cost = self.costs.of(kind)
        if cost is not None:
            # Nothing is cheaper than a plain step; what seems so met a machine that sped up.
            self.account.book(tokens, max(cost + (kind == PLAIN), 1.0))

    def _time_plain(self, seconds: float) -> None:
        if self._since:
            self._plain.clear()
            self._since = 0
        self._plain.append(seconds)
        self.costs.time_plain(seconds)

    def _time(self, kind: Kind, seconds: float) -> None:
        self._since += 1
        self.costs.age += 1
        plain = _median(self._plain, 1) if self._since <= PAIRED else None
        if plain is None and self.costs.of(kind) is None:
            plain = self.costs.plain  # better than nothing
        if plain is not None:
            self.costs.add(kind, seconds / plain)

    def move(self, setting: Hashable) -> None:
        """Steps take other times from here on, as in a smaller batch."""
        if not self.enabled:
            return
        self.costs = self.known.setdefault(setting, self.costs.lent())
        self._plain.clear()
        self._since = 0

    def details(self) -> dict[str, Any]:
        """For ``SpecStats.details``: what is expected of speculation, and whether it is paused."""
        if not self.enabled:
            return {}
        plain, tokens, cost = self.costs.plain, self.account.tokens, self.account.cost
        return {
            "controller": {
                "predicted_speedup": tokens / cost if tokens and cost else None,
                "plain_seconds": plain,
                "speculative_seconds": plain * cost if plain and cost else None,
                "falls_back": self.account.paused,
            }
        }


def _median(values: Sequence[float], fewest: int = TRUSTED) -> float | None:
    """The median of what noise only adds to; None if there are too few."""
    return statistics.median_low(values) if len(values) >= fewest else None


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)


#: By model, strategy and setting.
_costs: weakref.WeakKeyDictionary[Any, dict[Hashable, dict[Hashable, Costs]]]
_costs = weakref.WeakKeyDictionary()
_accounts: weakref.WeakKeyDictionary[Any, dict[Hashable, Account]] = weakref.WeakKeyDictionary()


def controller_for(
    model: Any, strategy: Hashable, setting: Hashable, stats: SpecStats, enabled: bool
) -> Controller:
    """A controller that knows what earlier calls of the same model have shown.

    Args:
        model: what is remembered is forgotten with it.
        strategy: whose account it is: the strategy with its options and its adapter.
        setting: what else step times depend on: batch size, context length, device.
    """
    if not enabled:
        return Controller(stats, Costs(), Account(), enabled)
    known = _costs.setdefault(model, {}).setdefault(strategy, {})
    account = _accounts.setdefault(model, {}).setdefault(strategy, Account())
    return Controller(stats, known.setdefault(setting, Costs()), account, enabled, known)
