"""What is learned while decoding: a budget, step times, and how right predictions are."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hf_spec.core.shapes import HostTree
from hf_spec.threads import locked

Array = np.ndarray[Any, np.dtype[Any]]

# --------------------------------------------------------------------------------------------------
# What drafting may cost, and when something that did not pay is tried again. Knows only numbers.
#
# Predictions may be wrong, so the budget compares results with plain decoding. Its unit is one
# plain step: a drafting step gains its emitted tokens per row and costs its time. Until drafting
# has shown its value, it may have lost at most
#
#     (1 + 2 / rows) (1 + ln(1 + n / 16))
#
# plain steps in n tokens: with one batch row 3 at first and 10 of 128, with eight rows 1.25 and 4.
# The mean of more rows varies less, so that less tells whether drafting pays. Regret of this order
# in n is the least with which the better of two choices can be found (Lai and Robbins,
# "Asymptotically efficient adaptive allocation rules", 1985).

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
FIRST_PAUSE, LAST_PAUSE = 16, 256


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
    wait: int = FIRST_PAUSE

    def due(self) -> bool:
        """Count a step without it; return whether it is tried in this one."""
        self.steps += 1
        if self.steps < self.wait:
            return False
        self.steps, self.wait = 0, min(2 * self.wait, LAST_PAUSE)
        return True


# --------------------------------------------------------------------------------------------------
# Step times, learned while decoding: a mean for each size, that is, number of step tokens per
# row.
#
# ProPD (section 4.2.1) fits a line to these means. Kernels process tokens in blocks, so that some
# are free and others expensive: sizes that are known are taken as they are, others lie between
# them.

#: Least weight of a new step in the mean of its size.
TIME_ALPHA = 1 / 16
#: Weight of the newest step in the machine's pace. Other work slows down all sizes alike, for ten
#: or more steps: most of the variation of step times.
PACE_ALPHA = 0.3
#: The first step of a size is a warm-up and is ignored. The median of the next ones is used until
#: there are this many; then they are averaged.
FIRST = 5
#: Steps are clipped to this multiple of the mean: a stall says nothing about a size's cost.
CLIP = 2.0
#: What a mean of n steps may be too large by is this share, divided by n: sizes of few steps
#: get the benefit of the doubt, or one bad sample would rule them out for good.
DOUBT = 0.2
#: Least duration; clocks may be coarse.
TICK = 1e-9


@dataclass
class MeanTime:
    """The mean duration of something, of logarithms, as the pace is one: else noise would move the
    two apart while only one size is taken.

    Attributes:
        mean: in seconds; None while unknown.
        first: the first durations that counted; None before the very first one.
        count: durations that the mean stands for; 0 if it is a guess.
    """

    mean: float | None = None
    first: list[float] | None = None
    count: int = 0

    def add(self, seconds: float) -> None:
        if self.first is None:
            self.first = []
            return
        self.count += 1
        if len(self.first) < FIRST:
            self.first.append(seconds)
            self.mean = statistics.median_low(self.first)
        elif self.mean is not None:
            self.mean *= ratio(seconds, self.mean) ** max(TIME_ALPHA, 1 / self.count)


@dataclass
class StepTimes:
    """Mean times of steps by their size, from the start of the forward.

    Drafting is timed separately: it hardly depends on the size, and plain steps have none. All
    times are normalized to the same pace, so that sizes seen at different moments are comparable.

    Attributes:
        pace: the machine's current pace: actual seconds per normalized second.
        sizes: by step tokens per batch row.
        drafting: before the forward of a step that drafts.
        drafted: one of the drafting forwards, if drafting runs the model.
    """

    pace: float = 1.0
    sizes: dict[float, MeanTime] = field(default_factory=dict)
    drafting: MeanTime = field(default_factory=MeanTime)
    draft_forward: MeanTime = field(default_factory=MeanTime)

    def observe(
        self, size: float, seconds: float, drafting: float | None = None, forwards: int = 0
    ) -> None:
        """Learn from a finished step.

        Args:
            seconds: duration from the start of the forward.
            drafting: seconds before that; None if it did not draft, or not in the typical way.
            forwards: forwards of the model while drafting.
        """
        seconds = max(seconds, TICK)
        if drafting is not None:
            drafting = max(drafting, TICK) / self.pace
            self.drafting.add(drafting)
            if forwards:
                self.draft_forward.add(drafting / forwards)
        one, estimate = self.sizes.setdefault(size, MeanTime()), self.seconds(size)
        known = one.mean if one.count else None
        # A stall of a new size is clipped, too.
        one.add((seconds if estimate is None else min(seconds, CLIP * estimate)) / self.pace)
        if known:
            self.pace *= ratio(seconds, self.pace * known) ** PACE_ALPHA

    def mean(self, size: float) -> float | None:
        """The mean time of a size at the current pace; None while unknown."""
        one = self.sizes.get(size)
        return None if one is None or one.mean is None else self.pace * one.mean

    @property
    def means(self) -> dict[float, float]:
        """All known mean times at the current pace, by size."""
        found = {size: self.mean(size) for size in sorted(self.sizes)}
        return {size: mean for size, mean in found.items() if mean is not None}

    def curve(self, sizes: Sequence[float]) -> Any:
        """``(sizes,)`` seconds of these sizes, known or not; None while fewer than two are known.

        No size takes longer than a larger one; those between two known sizes, and beyond, lie on
        lines. Means of few steps are :data:`doubted <DOUBT>`.
        """
        means = self.means
        if len(means) < 2:
            return None
        known, rising = np.array([*means]), np.array([*means.values()])
        rising *= [1 - DOUBT / count if (count := self.sizes[size].count) else 1 for size in means]
        rising = np.minimum.accumulate(rising[::-1])[::-1]
        wanted = np.asarray(sizes, float)
        return np.interp(wanted, known, rising) + self.slope * np.maximum(wanted - known[-1], 0)

    def seconds(self, size: float) -> float | None:
        """The time of a size, known or not; None while fewer than two are known."""
        found = self.curve([size])
        return self.mean(size) if found is None else float(found[0])

    @property
    def slope(self) -> float:
        """Seconds of one more step token, by the two largest sizes that are known."""
        (small, first), (large, last) = list(self.means.items())[-2:]
        return max(last - first, 0.0) / (large - small)

    @property
    def drafting_seconds(self) -> float | None:
        """Seconds of drafting; None while unknown."""
        return None if self.drafting.mean is None else self.pace * self.drafting.mean

    @property
    def draft_forward_seconds(self) -> float | None:
        """Seconds of one drafting forward; None while unknown."""
        return None if self.draft_forward.mean is None else self.pace * self.draft_forward.mean

    def plain_seconds(self) -> float | None:
        """Seconds of a plain step; None while unknown."""
        return self.mean(1) or self.seconds(1)

    def guess(self, others: StepTimes, share: float) -> None:
        """Guess what is unknown here as this share of what it takes elsewhere, until it is
        observed."""
        for size, spent in others.means.items():
            if self.mean(size) is None:
                self.sizes.setdefault(size, MeanTime()).mean = share * spent / self.pace

    def elsewhere(self, rows: float) -> StepTimes:
        """Guesses for batches of ``rows`` times as many rows, until steps are observed there."""
        means = self.means
        times = self.curve([size * rows for size in means])
        guesses = {} if times is None else dict(zip(means, times.tolist()))
        drafting, forward = MeanTime(self.drafting_seconds), MeanTime(self.draft_forward_seconds)
        return replace(StepTimes.guessed(guesses), drafting=drafting, draft_forward=forward)

    @classmethod
    def guessed(cls, seconds: dict[float, float]) -> StepTimes:
        """Known times by size, used until steps of these sizes are observed."""
        return cls(sizes={size: MeanTime(spent) for size, spent in seconds.items()})


def ratio(seconds: float, expected: float) -> float:
    """Measured over expected seconds, within :data:`CLIP`."""
    return min(max(seconds / expected, 1 / CLIP), CLIP)


# --------------------------------------------------------------------------------------------------
# Calibration of predicted probabilities.

#: Weight of a new prediction, and number of correct predictions that the prior stands for.
CALIBRATION_ALPHA, GUESSED = 1 / 256, 8.0
#: Bounds of the factors; far outside, predictions carry no information.
LEAST, MOST = 0.02, 4.0


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
            sums[distance - 1] += value - CALIBRATION_ALPHA * sums[distance - 1]

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


# --------------------------------------------------------------------------------------------------
# What the policy has learned about a strategy on a model: step times and gains, per setting.

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
        tokens_per_second: tokens of all rows per second.
        sizes_to_time: draft tokens that the next steps must have.
        retries: when to try again what did not pay: ``plain`` steps, ``probes`` in steps without
            predictions.
    """

    times: StepTimes = field(default_factory=StepTimes)
    tokens_per_second: Average = field(default_factory=Average)
    sizes_to_time: deque[int] = field(default_factory=deque)
    retries: defaultdict[str, Retry] = field(default_factory=lambda: defaultdict(Retry))

    def times_plain(self) -> bool:
        """Whether the next step is plain for its time, without which nothing can be judged."""
        return self.times.mean(1) is None or self.retries["plain"].due()


@dataclass
class Learned:
    """What was learned about a strategy, with its options and adapter, on a model.

    Attributes:
        settings: by batch size, context length and device; those of recorded steps apart.
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
