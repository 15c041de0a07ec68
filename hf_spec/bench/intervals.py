"""Confidence intervals of figures that sum over prompts, by the bootstrap.

Other prompts of the same kind would give other figures. Resampling the measured prompts, together
with the results of all contenders on each, estimates by how much (Efron & Tibshirani, "An
Introduction to the Bootstrap", 1993, chapters 8 and 13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: Share of the resampled figures that lie within an interval.
CONFIDENCE = 0.95
#: Fewest units that an interval is computed from.
FEWEST = 5
RESAMPLES = 2000

#: Lower and upper end.
Interval = tuple[float, float]


def interval(
    figure: Callable[..., Any], *columns: Sequence[float], seed: int = 0
) -> Interval | None:
    """The 95% percentile interval of a figure that is computed from sums over prompts.

    Args:
        figure: computes the figure from the sum of each column; the sums are arrays of equal shape.
        columns: one number per measured unit (a prompt or a batch), in the same order in all.
        seed: seed of the resampling.

    Returns:
        Lower and upper end; None if there are fewer than `FEWEST` units.
    """
    units = len(columns[0])
    if units < FEWEST:
        return None
    drawn = np.random.default_rng(seed).integers(units, size=(RESAMPLES, units))
    figures = figure(*(np.asarray(column)[drawn].sum(axis=1) for column in columns))
    low, high = np.quantile(figures, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
