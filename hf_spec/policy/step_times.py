"""Step times, estimated while decoding: ProPD, section 4.2.1.

Knows step tokens and seconds, but no trees or models. ``rows`` are step tokens per batch row.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

#: alpha of a size's mean step time, and lambda per step of its age, unless options say so.
TIME_ALPHA, DECAY = 0.1, 0.01
#: Weight of the newest step in the machine's pace. Other work slows down all sizes alike, for ten
#: or more steps: most of the variation of step times.
PACE_ALPHA = 0.3
#: Largest age, so that weights do not underflow.
OLDEST = 1000
#: The first step of a size is a warm-up and is ignored. The median of the next ones is used until
#: there are this many; then they are averaged.
FIRST = 5
#: Marks a line that has to be fitted.
UNKNOWN = object()
#: Weight of the line, in steps, relative to a size's own steps.
DRAWN = 16
#: Steps are clipped to this multiple of the mean: a stall says nothing about a size's cost.
CLIP = 2.0
#: Least duration; clocks may be coarse.
TICK = 1e-9
#: Number of sizes that are kept.
SIZES = 64


@dataclass
class SizeTime:
    """Steps of one size.

    Attributes:
        mean: T_perf, their mean seconds; None while unknown.
        last: number of the latest step, as ages are counted.
        first: seconds of the first steps that counted; None before the very first step.
        count: steps that the mean stands for, which count less as they age; 0 if it is a guess.
    """

    mean: float | None = None
    last: int = 0
    first: list[float] | None = None
    count: float = 0.0

    def add(
        self, seconds: float, step: int = 0, alpha: float = TIME_ALPHA, decay: float = DECAY
    ) -> None:
        """ln T_perf <- (1 - alpha) ln T_perf + alpha ln t; ``step`` is its number, as ages are
        counted.

        In logarithms, as the pace is: else noise would move the two apart while only one size is
        taken, and what is known of the other sizes would no longer be comparable.
        """
        gap, self.last = step - self.last, step
        if self.first is None:
            self.first = []
            return
        if len(self.first) < FIRST:
            self.first.append(seconds)
            self.mean, self.count = statistics.median_low(self.first), len(self.first)
        elif self.mean is not None:
            self.count = self.count * math.exp(-decay * gap) + 1
            self.mean *= ratio(seconds, self.mean) ** max(alpha, 1 / self.count)


@dataclass
class StepTimes:
    """T(i) = b0 + b1 i, seconds of a step of i step tokens per batch row (section 4.2.1).

    Drafting time is averaged separately: it hardly depends on the size, and plain steps have none.
    All times are normalized to the same pace, so that sizes seen at different moments are
    comparable.

    Attributes:
        steps: number of observed steps.
        wide: those of them with more than one token per batch row. Ages are counted in these, so
            that pauses of plain steps do not age anything.
        pace: the machine's current pace: actual seconds per normalized second.
        sizes: known sizes, by step tokens per batch row.
        drafting: seconds before the forward of a step that drafts.
        drafted: seconds of one of the drafting forwards, if drafting runs the model.
        alpha, decay: least weight of a new step in the mean of its size; lambda, by which sizes
            lose weight per step since they were last taken.
    """

    steps: int = 0
    wide: int = 0
    pace: float = 1.0
    sizes: dict[int, SizeTime] = field(default_factory=dict)
    drafting: SizeTime = field(default_factory=SizeTime)
    drafted: SizeTime = field(default_factory=SizeTime)
    alpha: float = TIME_ALPHA
    decay: float = DECAY
    #: The line at a pace of 1, until the next step is observed.
    _line: Any = UNKNOWN

    def observe(
        self, rows: int, seconds: float, drafting: float | None = None, forwards: int = 0
    ) -> None:
        """Learn from a finished step.

        Args:
            seconds: duration from the start of the forward.
            drafting: seconds before that; None if it did not draft, or not in the typical way.
            forwards: forwards of the model while drafting.
        """
        self.steps += 1
        self.wide += rows > 1
        seconds = max(seconds, TICK)
        if drafting is not None:
            drafting = max(drafting, TICK)
            self.drafting.add(drafting / self.pace, alpha=self.alpha)
            if forwards:
                self.drafted.add(drafting / (forwards * self.pace), alpha=self.alpha)
        if rows not in self.sizes and len(self.sizes) == SIZES:
            del self.sizes[min(self.sizes, key=lambda size: self.sizes[size].last)]
        size = self.sizes.setdefault(rows, SizeTime())
        expected, counted = size.mean if size.count else None, seconds
        if expected is None and (line := self.line) is not None:  # clip stalls of new sizes, too
            counted = min(seconds, CLIP * (line[0] + line[1] * rows))
        size.add(counted / self.pace, self.wide, self.alpha, self.decay)
        if expected:
            self.pace *= ratio(seconds, self.pace * expected) ** PACE_ALPHA
        self._line = UNKNOWN

    def mean(self, rows: int) -> float | None:
        """T_perf of a size at the current pace; None while unknown."""
        size = self.sizes.get(rows)
        return None if size is None or size.mean is None else self.pace * size.mean

    @property
    def means(self) -> dict[int, float]:
        """T_perf at the current pace, by step tokens, of all sizes with known times."""
        sizes = sorted(self.sizes.items())
        return {i: self.pace * one.mean for i, one in sizes if one.mean is not None}

    @property
    def line(self) -> tuple[float, float] | None:
        """b0 and b1, both >= 0; None while fewer than two sizes are known.

        Plain steps are left out if two other sizes are known: devices often have faster kernels for
        a single token, and a line through it would overestimate the cost per token.
        """
        if self._line is UNKNOWN:
            self._line = self._fitted()
        if self._line is None:
            return None
        return self.pace * self._line[0], self.pace * self._line[1]

    def _fitted(self) -> tuple[float, float] | None:
        """The line at a pace of 1."""
        means = {i: one.mean for i, one in sorted(self.sizes.items()) if one.mean is not None}
        if len(means) < 2:
            return None
        if len(means) > 2:
            means.pop(1, None)
        ages = [min(self.wide - self.sizes[i].last, OLDEST) for i in means]
        newest = min(ages)
        weights = [math.exp(-self.decay * (age - newest)) for age in ages]
        return fit_line(list(means), list(means.values()), weights)

    def seconds(self, rows: int) -> float | None:
        """Seconds of a step of this size, drafting included; None while unknown."""
        line = self.line
        if line is None:
            return None
        return line[0] + line[1] * rows + (self.drafting_seconds or 0.0)

    def curve(self, most: int) -> list[float]:
        """Seconds of steps of 0, 1, ... ``most`` tokens without drafting, if the line is known.

        Measured times, shrunk towards the line if there are few, and never falling: kernels process
        tokens in blocks, so that some tokens are free and others expensive. Beyond the smallest and
        the largest known size, it follows the line.
        """
        line, means = self.line, self.means
        assert line is not None
        if len(means) > 2:
            means.pop(1, None)
        rows, drawn, weights = list(means), [], []
        for size, mean in means.items():
            age = min(self.wide - self.sizes[size].last, OLDEST)
            known = self.sizes[size].count * math.exp(-self.decay * age)
            drawn.append((known * mean + DRAWN * (line[0] + line[1] * size)) / (known + DRAWN))
            weights.append(known + DRAWN)
        rising = never_falling(drawn, weights)
        beyond = max(most, rows[-1]) + 1
        ends = (max(rising[0] - line[1] * rows[0], 0.0), rising[-1] + line[1] * (beyond - rows[-1]))
        rows, rising = [0, *rows, beyond], [ends[0], *rising, ends[1]]
        found: list[float] = np.interp(np.arange(most + 1), rows, rising).tolist()
        return found

    @property
    def drafting_seconds(self) -> float | None:
        """Seconds of drafting; None while unknown."""
        return None if self.drafting.mean is None else self.pace * self.drafting.mean

    @property
    def drafted_seconds(self) -> float | None:
        """Seconds of one drafting forward; None while unknown."""
        return None if self.drafted.mean is None else self.pace * self.drafted.mean

    def plain_seconds(self) -> float | None:
        """Seconds of a plain step, measured if possible, otherwise estimated."""
        mean = self.mean(1)
        if mean is None and self.line is not None:
            mean = sum(self.line)
        return mean

    def elsewhere(self, share: float, scale: float) -> StepTimes:
        """Guesses for other conditions, until steps are observed there: the line at two sizes, and
        a plain step.

        Args:
            share: least duration of a step, as a share of its duration here.
            scale: cost of a step token, as a multiple of its cost here.
        """
        line, plain = self.line, self.plain_seconds()
        if plain is None:
            return StepTimes()
        here, cost = {1: plain}, 0.0
        if line is not None:
            cost, wide = line[1], [rows for rows in self.means if rows > 1]
            here |= {rows: line[0] + cost * rows for rows in (wide[0], wide[-1])}
        added = {rows: cost * (scale - 1) * rows for rows in here}
        times = {rows: max(spent + added[rows], spent * share) for rows, spent in here.items()}
        drafting, drafted = SizeTime(self.drafting_seconds), SizeTime(self.drafted_seconds)
        found = StepTimes.guessed(times)
        return replace(found, drafting=drafting, drafted=drafted)

    @classmethod
    def guessed(cls, seconds: dict[int, float]) -> StepTimes:
        """Known times by step tokens, used until steps of these sizes are observed."""
        return cls(sizes={rows: SizeTime(spent) for rows, spent in seconds.items()})


def ratio(seconds: float, expected: float) -> float:
    """Measured over expected seconds, within :data:`CLIP`."""
    return min(max(seconds / expected, 1 / CLIP), CLIP)


def never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nondecreasing values closest to these in weighted squares: neighbors in the wrong order
    are pooled until there are none (Ayer et al., 1955)."""
    pools: list[list[float]] = []  # mean, weight and count of each
    for value, weight in zip(values, weights):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            mean, own, count = pools.pop()
            last = pools[-1]
            last[0] = (last[0] * last[1] + mean * own) / (last[1] + own)
            last[1], last[2] = last[1] + own, last[2] + count
    return [mean for mean, _, count in pools for _ in range(int(count))]


def fit_line(rows: Any, seconds: Any, weights: Any) -> tuple[float, float]:
    """b0, b1 >= 0 that minimise sum W (T - b0 - b1 i)^2 over the sizes i, in closed form.

    Args:
        rows, seconds, weights: ``(sizes,)``; at least two sizes differ.
    """
    rows, seconds, shares = (np.asarray(part, float) for part in (rows, seconds, weights))
    shares = shares / shares.sum()

    def mean(values: Any) -> float:
        return float(shares @ values)

    spread, middle = mean((rows - mean(rows)) ** 2), mean(seconds)
    slope = mean((rows - mean(rows)) * (seconds - middle)) / max(spread, 1e-300)
    if slope <= 0:  # noise, or only one size has weight: tokens are free
        return middle, 0.0
    if middle < slope * mean(rows):
        return 0.0, mean(rows * seconds) / mean(rows**2)
    return middle - slope * mean(rows), slope
