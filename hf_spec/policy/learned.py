"""What the policy has learned of a strategy on a model: what steps take and bring, by setting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hf_spec.drafting.options import CANDIDATES
from hf_spec.policy.guard import Guard
from hf_spec.policy.memory import alone
from hf_spec.policy.step_times import StepTimes

#: Steps of each of the two sizes that a setting starts with: a line needs two, and the first step
#: of a size warms something up.
WARM_UP = 2
#: Steps that draft between two looks at a plain one, doubling from the first to the last.
LOOKS = (64, 1024)
#: Steps without predictions until probes are looked at though that is not worth their time.
BLIND = (4, 256)
#: h before anything is known of it, and the weight of a step in it and in rho.
WORTH, ALPHA = 1.0, 1 / 32


def first_sizes(batch_size: int) -> list[tuple[int, int]]:
    """Candidates, and nodes with probes, of a setting's first steps: the larger the batch, the
    fewer, since a step of many rows may cost several plain ones."""
    wide = max(CANDIDATES // batch_size, 2)
    return [(wide, wide // 2), (wide // 2, 1)] * WARM_UP


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
        times: what they take; of pruned ones, by rows before pruning.
        rate: tokens of all rows per second.
        kept: accepted candidates per promised one, without pruning and with it; per row and step
            where nothing is promised.
        tries: sizes that the next steps must have.
        settled: steps since there were any.
        wide: steps that drafted since a plain one.
        look: those of them until the next one is due.
        turns: steps since both ways of pruning were known, or were looked at again.
        blind, patience: steps without predictions since probes were looked at, and how many there
            are until the next look where it is not worth its time.
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

    def lent(self, scale: float) -> Setting:
        """What is expected where rows cost so many times as much."""
        return Setting(self.times.seeded(scale), self.pruned.seeded(scale))

    def shifted(self, batch_size: int, here: int) -> Setting:
        """What is expected of so many packed rows where these are of another number."""
        return Setting(self.times.shifted(batch_size - here, min(batch_size / here, 1.0)))


@dataclass
class Learned:
    """What a strategy has shown on a model: with its options and its adapter.

    Attributes:
        guard: what it has brought.
        lookups: what look-ups have brought by themselves while the rest paused.
        settings: by batch size, context length and device.
        worth: h.
        packed: whether rows are counted over the whole batch, whose candidates stand one behind
            the other: then a row costs the same in all batches, and larger ones have more of them.
    """

    guard: Guard = field(default_factory=Guard)
    lookups: Guard = field(default_factory=Guard)
    settings: dict[tuple[int, int, str], Setting] = field(default_factory=dict)
    worth: float = WORTH
    packed: bool = False

    def first_sizes(self, batch_size: int) -> list[tuple[int, int]]:
        """:func:`first_sizes` of a batch of this size."""
        return first_sizes(1 if self.packed else batch_size)

    @alone
    def setting(
        self, key: tuple[int, int, str], measured: Callable[[], dict[int, float]] = dict
    ) -> Setting:
        """That of a key; at first the nearest one lends what it knows, or times were measured."""
        if key not in self.settings:
            near = [one for one in self.settings if one[2] == key[2]]
            if near:
                best = min(near, key=lambda one: (abs(one[0] - key[0]), abs(one[1] - key[1])))
                self.settings[key] = (
                    self.settings[best].shifted(key[0], best[0])
                    if self.packed
                    else self.settings[best].lent(key[0] / best[0])
                )
            else:
                self.settings[key] = Setting(StepTimes.guessed(measured()))
            if self.settings[key].times.line is None:
                self.settings[key].tries.extend(self.first_sizes(key[0]))
        return self.settings[key]
