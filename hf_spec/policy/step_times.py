"""Step times, learned while decoding: a mean for each size, that is, number of step tokens per row.

ProPD (section 4.2.1) fits a line to these means. Kernels process tokens in blocks, so that some are
free and others expensive: sizes that are known are taken as they are, others lie between them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

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
    sizes: dict[int, MeanTime] = field(default_factory=dict)
    drafting: MeanTime = field(default_factory=MeanTime)
    drafted: MeanTime = field(default_factory=MeanTime)

    def observe(
        self, size: int, seconds: float, drafting: float | None = None, forwards: int = 0
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
                self.drafted.add(drafting / forwards)
        one, estimate = self.sizes.setdefault(size, MeanTime()), self.seconds(size)
        known = one.mean if one.count else None
        # A stall of a new size is clipped, too.
        one.add((seconds if estimate is None else min(seconds, CLIP * estimate)) / self.pace)
        if known:
            self.pace *= ratio(seconds, self.pace * known) ** PACE_ALPHA

    def mean(self, size: int) -> float | None:
        """The mean time of a size at the current pace; None while unknown."""
        one = self.sizes.get(size)
        return None if one is None or one.mean is None else self.pace * one.mean

    @property
    def means(self) -> dict[int, float]:
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

    def seconds(self, size: int) -> float | None:
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
    def drafted_seconds(self) -> float | None:
        """Seconds of one drafting forward; None while unknown."""
        return None if self.drafted.mean is None else self.pace * self.drafted.mean

    def plain_seconds(self) -> float | None:
        """Seconds of a plain step; None while unknown."""
        return self.mean(1) or self.seconds(1)

    def elsewhere(self, rows: float) -> StepTimes:
        """Guesses for batches of ``rows`` times as many rows, until steps are observed there."""
        means = self.means
        times = self.curve([size * rows for size in means])
        guesses = {} if times is None else dict(zip(means, times.tolist()))
        drafting, drafted = MeanTime(self.drafting_seconds), MeanTime(self.drafted_seconds)
        return replace(StepTimes.guessed(guesses), drafting=drafting, drafted=drafted)

    @classmethod
    def guessed(cls, seconds: dict[int, float]) -> StepTimes:
        """Known times by size, used until steps of these sizes are observed."""
        return cls(sizes={size: MeanTime(spent) for size, spent in seconds.items()})


def ratio(seconds: float, expected: float) -> float:
    """Measured over expected seconds, within :data:`CLIP`."""
    return min(max(seconds / expected, 1 / CLIP), CLIP)
