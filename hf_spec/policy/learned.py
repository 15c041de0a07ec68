"""What the policy has learned about a strategy on a model: step times and gains, per setting."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from hf_spec.core.memory import locked
from hf_spec.policy.budget import Budget, Retry
from hf_spec.policy.step_times import StepTimes

#: Steps of each of the two sizes that a setting starts with: the first one of a size is a warm-up.
WARM_UP = 2
#: Weight of one step in averages.
ALPHA = 1 / 32


@dataclass
class Average:
    """A ratio of sums in which newer steps count more."""

    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float) -> None:
        self.above += above - ALPHA * self.above
        self.below += below - ALPHA * self.below

    @property
    def value(self) -> float | None:
        return self.above / self.below if self.below > 0 else None


@dataclass
class Setting:
    """What is known of steps of one batch size, context length and device.

    Attributes:
        times: step times; those of pruned steps by step tokens before pruning.
        rate: tokens of all rows per second.
        sizes_to_time: draft tokens that the next steps must have.
        retries: when to try again what did not pay: ``plain`` steps, ``probes`` in steps without
            predictions.
    """

    times: StepTimes = field(default_factory=StepTimes)
    rate: Average = field(default_factory=Average)
    sizes_to_time: deque[int] = field(default_factory=deque)
    retries: defaultdict[str, Retry] = field(default_factory=lambda: defaultdict(Retry))

    def times_plain(self) -> bool:
        """Whether the next step is plain for its time, without which nothing can be judged."""
        return self.times.mean(1) is None or self.retries["plain"].due()


@dataclass
class Learned:
    """What was learned about a strategy, with its options and adapter, on a model.

    Attributes:
        settings: by batch size, context length and device.
        prediction_value: tokens that it is worth to have predictions in the next step.
    """

    budget: Budget = field(default_factory=Budget)
    settings: dict[tuple[int, int, str], Setting] = field(default_factory=dict)
    prediction_value: float = 1.0

    @locked
    def setting(self, key: tuple[int, int, str]) -> Setting:
        """The setting of a key; a new one starts from the nearest one."""
        if key not in self.settings:
            new = Setting()
            near = [one for one in self.settings if one[2] == key[2]]
            if near:
                best = min(near, key=lambda one: (abs(one[0] - key[0]), abs(one[1] - key[1])))
                new = Setting(self.settings[best].times.elsewhere(key[0] / best[0]))
            if len(new.times.means) < 2:
                # Larger batches have fewer, as a step of many tokens may cost several plain ones.
                new.sizes_to_time.extend([7, 3] * WARM_UP if key[0] == 1 else [3, 1] * WARM_UP)
            self.settings[key] = new
        return self.settings[key]
