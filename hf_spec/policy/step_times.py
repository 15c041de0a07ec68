"""What steps take while decoding: ProPD, section 4.2.1.

Knows rows and seconds; nothing of trees or models.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

#: alpha of a size's mean step time, and lambda per step of its age.
TIME_ALPHA, DECAY = 0.1, 0.01
#: Weight of the newest step in the machine's pace. Other work slows down all sizes alike, for some
#: ten steps and more: by far the most of what step times differ by.
PACE_ALPHA = 0.3
#: Ages from here on count alike, so that weights stay numbers.
OLDEST = 1000
#: The first step of a size warms something up and is left out; of so many after it the median is
#: taken, then they are averaged.
FIRST = 5
#: Steps after which a size that was not taken begins anew: the machine may be another by then.
STALE = 200
#: Stands for a line that is to be fitted.
UNKNOWN = object()
#: Steps that the line counts for beside a size's own.
DRAWN = 16
#: A step counts as at most so many mean ones: a stall is no news of the size's cost.
CLIP = 2.0
#: Sizes whose times are kept, and predictions whose errors are.
SIZES, ERRORS = 64, 256


@dataclass
class SizeTime:
    """Steps of one size.

    Attributes:
        mean: T_perf, their mean seconds; None before it is known.
        last: number of the latest step, as ages are counted.
        first: seconds of the first that counted; None before the very first step.
        count: steps that the mean stands for; they count less as they age.
    """

    mean: float | None = None
    last: int = 0
    first: list[float] | None = None
    count: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether the mean is that of steps; else it is from elsewhere."""
        return self.count > 0

    def add(self, seconds: float, step: int = 0) -> None:
        """T_perf <- (1 - alpha) T_perf + alpha t; ``step`` is its number, as ages are counted."""
        cold, gap = self.first is None, step - self.last
        if self.first is None or gap > STALE:
            self.first = []
        self.last = step
        if cold:
            return
        if len(self.first) < FIRST:
            self.first.append(seconds)
            self.mean, self.count = statistics.median_low(self.first), len(self.first)
        elif self.mean is not None:
            self.count = self.count * math.exp(-DECAY * gap) + 1
            alpha = max(TIME_ALPHA, 1 / self.count)
            self.mean += alpha * (min(seconds, CLIP * self.mean) - self.mean)


@dataclass
class StepTimes:
    """T(i) = b0 + b1 i, seconds of a step of i rows (section 4.2.1).

    Drafting is averaged apart: it hardly depends on the size, and plain steps go without. All times
    are kept at the same pace, so that sizes can be compared that were seen at different moments.

    Attributes:
        steps: how many were observed.
        wide: those of them with more than one row. Ages are counted in them: long pauses of plain
            steps make nothing older.
        pace: of the machine by now: seconds that pass where 1 is kept.
        sizes: what is known, by rows per batch row.
        drafting: seconds before the forward of a step that drafts.
        drafted: seconds of one forward among these, where drafting runs the model.
        errors: of the latest predictions, relative to the measured time.
    """

    steps: int = 0
    wide: int = 0
    pace: float = 1.0
    sizes: dict[int, SizeTime] = field(default_factory=dict)
    drafting: SizeTime = field(default_factory=SizeTime)
    drafted: SizeTime = field(default_factory=SizeTime)
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=ERRORS))
    #: The line at a pace of 1, until the next step is observed.
    _line: Any = UNKNOWN

    def observe(
        self, rows: int, seconds: float, drafting: float | None = None, forwards: int = 0
    ) -> None:
        """A step is over.

        Args:
            rows: of its forward, per batch row.
            seconds: from the forward on.
            drafting: seconds before it; None if it did not draft, or not as it mostly does.
            forwards: of the model while drafting.
        """
        self.steps += 1
        self.wide += rows > 1
        if drafting is not None:
            self._note_error(rows, seconds + drafting)
            self.drafting.add(drafting / self.pace)
            if forwards:
                self.drafted.add(drafting / (forwards * self.pace))
        if rows not in self.sizes and len(self.sizes) == SIZES:
            del self.sizes[min(self.sizes, key=lambda size: self.sizes[size].last)]
        size = self.sizes.setdefault(rows, SizeTime())
        expected = size.mean if size.measured else None
        line = self.line if expected is None else None
        if line is not None:  # a stall is no news of a new size, either
            size.add(min(seconds, CLIP * (line[0] + line[1] * rows)) / self.pace, self.wide)
        else:
            size.add(seconds / self.pace, self.wide)
        if expected and seconds > 0:
            change = seconds / (self.pace * expected)
            self.pace *= min(max(change, 1 / CLIP), CLIP) ** PACE_ALPHA
        self._line = UNKNOWN

    def _note_error(self, rows: int, seconds: float) -> None:
        known = rows in self.sizes and self.sizes[rows].measured
        expected = self.seconds(rows) if known and self.drafting.mean is not None else None
        if expected is not None and seconds > 0:
            self.errors.append(abs(expected - seconds) / seconds)

    def mean(self, rows: int) -> float | None:
        """T_perf of a size at the pace by now; None while unknown."""
        size = self.sizes.get(rows)
        return None if size is None or size.mean is None else self.pace * size.mean

    @property
    def means(self) -> dict[int, float]:
        """T_perf by rows at the pace by now, of the sizes whose time is known."""
        sizes = sorted(self.sizes.items())
        return {i: self.pace * one.mean for i, one in sizes if one.mean is not None}

    @property
    def line(self) -> tuple[float, float] | None:
        """b0 and b1, neither below 0; None while fewer than two sizes are known.

        Plain steps are left out where two other sizes are known: for a single row devices often
        have a faster way, and a line through it would make all rows look dear.
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
        weights = [math.exp(-DECAY * (age - newest)) for age in ages]
        return fit_line(list(means), list(means.values()), weights)

    def seconds(self, rows: Any) -> Any:
        """What steps of so many rows take, drafting included; None while unknown.

        Args:
            rows: a number, or an array of them.
        """
        line = self.line
        if line is None:
            return None
        return line[0] + line[1] * rows + (self.drafting_seconds or 0.0)

    def curve(self, most: int) -> list[float] | None:
        """What steps of 0, 1, ... ``most`` rows take, drafting left out; None while unknown.

        What was measured of a size, drawn to the line as far as it was measured seldom, and never
        falling: kernels take rows in blocks, so that some rows cost nothing and others much. Past
        the smallest and the largest size that are known it goes on as the line does.
        """
        line = self.line
        if line is None:
            return None
        means = self.means
        if len(means) > 2:
            means.pop(1, None)
        rows, drawn, weights = list(means), [], []
        for size, mean in means.items():
            age = min(self.wide - self.sizes[size].last, OLDEST)
            known = self.sizes[size].count * math.exp(-DECAY * age)
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
        """What drafting takes; None while unknown."""
        return None if self.drafting.mean is None else self.pace * self.drafting.mean

    @property
    def drafted_seconds(self) -> float | None:
        """What one forward of drafting takes; None while unknown."""
        return None if self.drafted.mean is None else self.pace * self.drafted.mean

    def plain_seconds(self) -> float | None:
        """What a plain step takes; measured rather than estimated where some were."""
        mean = self.mean(1)
        if mean is None and self.line is not None:
            mean = sum(self.line)
        return mean

    def seeded(self, scale: float = 1.0) -> StepTimes:
        """What is expected under other conditions: the line at two sizes and a plain step, each row
        as much dearer.

        Real steps take the place of these guesses.
        """
        line, plain = self.line, self.plain_seconds()
        if line is None or plain is None:
            return StepTimes() if plain is None else StepTimes.guessed({1: plain})
        slope, wide = line[1] * scale, [rows for rows in self.means if rows > 1]
        guess = {rows: line[0] + slope * rows for rows in (wide[0], wide[-1])}
        alone = max(plain + slope - line[1], plain * min(scale, 1.0))
        cost = StepTimes.guessed({1: alone, **guess})
        drafting, drafted = SizeTime(self.drafting_seconds), SizeTime(self.drafted_seconds)
        return replace(cost, drafting=drafting, drafted=drafted, errors=self.errors)

    def shifted(self, more: int, share: float) -> StepTimes:
        """What is expected where all steps have so many rows more beside those that are counted.

        Args:
            more: rows; below 0 if they have fewer.
            share: the least that a step can take, of what it takes here.
        """
        line, plain = self.line, self.plain_seconds()
        if line is None or plain is None:
            return StepTimes()
        added, wide = line[1] * more, [rows for rows in self.means if rows > 1]
        here = {1: plain, **{rows: line[0] + line[1] * rows for rows in (wide[0], wide[-1])}}
        return StepTimes.guessed(
            {rows: max(spent + added, spent * share) for rows, spent in here.items()}
        )

    @classmethod
    def guessed(cls, seconds: dict[int, float]) -> StepTimes:
        """Times from elsewhere, by rows, that count until steps of these sizes were observed."""
        return cls(sizes={rows: SizeTime(spent) for rows, spent in seconds.items()})

    @property
    def median_error(self) -> float | None:
        return statistics.median(self.errors) if self.errors else None


def never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The values that never fall and are closest to these, by weighted squares: neighbours in the
    wrong order are put together until there are none (Ayer et al., 1955)."""
    pools: list[list[float]] = []  # mean, weight and count of each
    for value, weight in zip(values, weights):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            mean, own, count = pools.pop()
            last = pools[-1]
            last[0] = (last[0] * last[1] + mean * own) / (last[1] + own)
            last[1], last[2] = last[1] + own, last[2] + count
    return [mean for mean, _, count in pools for _ in range(int(count))]


def fit_line(
    rows: Sequence[float], seconds: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """b0, b1 >= 0 that minimise sum W (T - b0 - b1 i)^2 over the sizes i, in closed form.

    Args:
        rows, seconds, weights: of each size; at least two are different.
    """
    total = sum(weights)
    weights = [weight / total for weight in weights]
    mean_rows = sum(w * i for w, i in zip(weights, rows))
    mean = sum(w * t for w, t in zip(weights, seconds))
    spread = sum(w * (i - mean_rows) ** 2 for w, i in zip(weights, rows))
    shared = sum(w * (i - mean_rows) * (t - mean) for w, i, t in zip(weights, rows, seconds))
    slope = shared / max(spread, 1e-300)
    if slope <= 0:  # noise, or weights that leave one size only: rows are free
        return mean, 0.0
    if mean - slope * mean_rows < 0:
        squares = sum(w * i * i for w, i in zip(weights, rows))
        return 0.0, sum(w * i * t for w, i, t in zip(weights, rows, seconds)) / squares
    return mean - slope * mean_rows, slope
