"""How far figures over prompts may be off: bootstrap intervals, paired where two are compared.

Other prompts of the same kind would have given other figures. Resampling the prompts that were
measured, with what all contenders made of each, tells by how much (Efron & Tibshirani, "An
Introduction to the Bootstrap", 1993, chapters 8 and 13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: Of samples as many as this share lie within an interval.
CONFIDENCE = 0.95
#: Fewer units tell nothing of how much they differ.
FEWEST = 5
RESAMPLES = 2000

#: Low and high end.
Interval = tuple[float, float]


def interval(
    figure: Callable[..., Any], *columns: Sequence[float], seed: int = 0
) -> Interval | None:
    """Where a figure of sums over prompts lies in 95 of 100 samples of such prompts.

    Args:
        figure: made of the columns' sums, arrays of equal shape.
        columns: a number for each unit that was measured (a prompt, or a batch of them), in the
            same order in all.
        seed: of the resampling.

    Returns:
        None if there are fewer than `FEWEST` units.
    """
    from scipy.stats import bootstrap

    if len(columns[0]) < FEWEST:
        return None

    def statistic(*samples: Any, axis: int) -> Any:
        return figure(*(sample.sum(axis=axis) for sample in samples))

    found = bootstrap(
        columns, statistic, paired=True, vectorized=True, n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE, method="percentile", rng=seed,
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)
