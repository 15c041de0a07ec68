"""What the policy has learned about a strategy on a model: step times and gains, per setting."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hf_spec.core.memory import locked
from hf_spec.drafting.options import CANDIDATES
from hf_spec.policy.guard import Guard
from hf_spec.policy.step_times import StepTimes

#: Steps of each of the two sizes that a setting starts with. Fitting a line takes two sizes, and
#: the first step of a size is a warm-up.
WARM_UP = 2
#: Drafting steps between two plain steps taken for timing; doubles from the first to the last. The
#: first is small: drafting is judged by what a plain step costs, and one time may be a stall's.
LOOKS = (16, 1024)
#: Steps without predictions until probes are tried although they do not seem to pay.
BLIND = (4, 256)
#: Alternating steps with and without pruning at first, and steps of one kind until the other is
#: tried again.
TRIED, AGAIN = 8, 256
#: Initial value of h, and the weight of one step in h and rho.
WORTH, ALPHA = 1.0, 1 / 32


@dataclass
class Average:
    """A ratio of sums in which newer steps count more."""

    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float, alpha: float = ALPHA) -> None:
        self.above += above - alpha * self.above
        self.below += below - alpha * self.below

    @property
    def value(self) -> float | None:
        return self.above / self.below if self.below > 0 else None


@dataclass
class Setting:
    """What is known of steps of one batch size, context length and device.

    Attributes:
        times: step times; those of pruned steps by step tokens before pruning.
        rate: tokens of all rows per second.
        kept: accepted candidates per promised one, without pruning and with it; per row and step
            where nothing is promised.
        tries: sizes that the next steps must have.
        settled: steps since a size was last taken from ``tries``.
        wide: drafting steps since the last plain one.
        look: drafting steps until the next plain one is due.
        turns: steps since times with and without pruning were both known, or last refreshed.
        blind, patience: steps without predictions since probes were last tried, and the number of
            such steps until they are tried although they do not seem to pay.
    """

    times: StepTimes = field(default_factory=StepTimes)
    pruned: StepTimes = field(default_factory=StepTimes)
    rate: Average = field(default_factory=Average)
    kept: tuple[Average, Average] = field(default_factory=lambda: (Average(), Average()))
    tries: deque[tuple[int, int]] = field(default_factory=deque)
    settled: int = 0
    wide: int = 0
    look: int = LOOKS[0]
    turns: int = 0
    blind: int = 0
    patience: int = BLIND[0]

    def plain_is_due(self) -> bool:
        """Whether the next step should be plain for timing."""
        if self.times.mean(1) is None:  # it takes two: the first of a size is not counted
            return (self.times.steps + self.pruned.steps) % 3 == 2
        if self.wide < self.look:
            return False
        self.look = min(2 * self.look, LOOKS[1])
        return True

    def looks(self, tokens: int, worth: float) -> bool:
        """Whether a step without predictions has probes, so that the next one has some.

        If they do not pay, they are tried at growing intervals, as the text may change.

        Args:
            tokens: step tokens with probes.
            worth: what predictions are worth, in tokens.
        """
        plain, rate = self.times.plain_seconds(), self.rate.value
        if self.times.line is None or plain is None or rate is None:
            return True
        self.blind += 1
        if worth > rate * (self.times.curve(tokens)[-1] - plain):
            self.patience = BLIND[0]
        elif self.blind < self.patience:
            return False
        else:
            self.patience = min(2 * self.patience, BLIND[1])
        self.blind = 0
        return True

    def prunes(self, tokens: int, drafted: float) -> bool:
        """Whether pruning a step pays; both kinds of steps alternate until that is known.

        Args:
            tokens: step tokens before pruning.
            drafted: what :attr:`kept` is relative to.
        """
        both = self.times, self.pruned
        counts = [sum(one.count for rows, one in times.sizes.items() if rows > 1) for times in both]
        means: list[Any] = [times.mean(tokens) for times in both]
        if None in means:
            means = [times.seconds(tokens) for times in both]
        kept: list[Any] = [one.value for one in self.kept]
        if None in means + kept or min(counts) < TRIED:
            return counts[1] < counts[0]
        (whole, pruned), (without, with_) = means, kept
        # Pruning adds no tokens; differences within noise are ignored.
        noise = sum(one.above / one.below**2 for one in self.kept) ** 0.5  # of counts
        lost = max(without - with_ - noise, 0.0) * drafted
        better = (self.rate.value or 0.0) * (whole - pruned) > lost
        self.turns += 1
        return bool(better) != (self.turns % AGAIN < 4)


@dataclass
class Learned:
    """What was learned about a strategy, with its options and adapter, on a model.

    Attributes:
        guard: account of the strategy.
        lookups: account of look-ups alone while the rest is paused.
        settings: by batch size, context length and device.
        worth: h.
        packed: whether step tokens are counted over the whole batch, with all candidates packed
            together. A step token then costs the same in all batches.
    """

    guard: Guard = field(default_factory=Guard)
    lookups: Guard = field(default_factory=Guard)
    settings: dict[tuple[int, int, str], Setting] = field(default_factory=dict)
    worth: float = WORTH
    packed: bool = False

    def first_sizes(self, batch_size: int) -> list[tuple[int, int]]:
        """Candidates, and nodes with probes, of a setting's first steps. Larger batches have fewer,
        as a step of many tokens may cost several plain ones."""
        wide = max(CANDIDATES // (1 if self.packed else batch_size), 2)
        return [(wide, wide // 2), (wide // 2, 1)] * WARM_UP

    @locked
    def setting(self, key: tuple[int, int, str]) -> Setting:
        """The setting of a key; a new one starts from the nearest one."""
        if key not in self.settings:
            near = [one for one in self.settings if one[2] == key[2]]
            if near:
                best = min(near, key=lambda one: (abs(one[0] - key[0]), abs(one[1] - key[1])))
                ratio, known = key[0] / best[0], self.settings[best]
                scale, more = (1.0, key[0] - best[0]) if self.packed else (ratio, 0)
                change = min(ratio, 1.0), scale, more
                new = Setting(known.times.elsewhere(*change), known.pruned.elsewhere(*change))
            else:
                new = Setting()
            if new.times.line is None:
                new.tries.extend(self.first_sizes(key[0]))
            self.settings[key] = new
        return self.settings[key]
