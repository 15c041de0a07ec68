"""Measurements of a run, and what they amount to per strategy and task.

Intervals are percentiles of the bootstrap: other prompts of the same kind would give other figures,
and resampling the measured ones, with the results of all contenders on each, estimates by how much
(Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 8 and 13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import truediv
from typing import Any

import numpy as np

from hf_spec.core.stats import PHASES, SpecStats
from hf_spec.tools.bench.agreement import Agreement
from hf_spec.tools.bench.contenders import BASELINE, Contender
from hf_spec.tools.bench.prompts import Prompt
from hf_spec.tools.bench.report import described, plotted
from hf_spec.tools.data import ALL

#: Share of the resampled figures that lie within an interval.
CONFIDENCE = 0.95
#: Fewest units that an interval is computed from.
FEWEST = 5
RESAMPLES = 2000

#: Lower and upper end.
Interval = tuple[float, float]


def interval(figure: Callable[..., Any], *columns: Sequence[float]) -> Interval | None:
    """The 95% interval of a figure that is computed from sums over prompts; None if there are fewer
    than `FEWEST` units.

    Args:
        figure: computes the figure from the sum of each column; the sums are arrays of equal shape.
        columns: one number per measured unit (a prompt or a batch), in the same order in all.
    """
    units = len(columns[0])
    if units < FEWEST:
        return None
    drawn = np.random.default_rng(0).integers(units, size=(RESAMPLES, units))
    figures = figure(*(np.asarray(column)[drawn].sum(axis=1) for column in columns))
    low, high = np.quantile(figures, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


@dataclass
class Measurement:
    """One contender on one batch: a call of ``generate``.

    Attributes:
        batch_size: the nominal batch size; a category's last batch may be smaller.
        prompts: indices of the prompts, which are of one category.
        rows: the new tokens of each sequence, up to and including the first EOS.
        row_steps: forward passes of the model, counted once per unfinished sequence.
        stats: statistics of the call; None for stock contenders.
        agreement: one per sequence; None if outputs cannot be compared, as in sampled batches. Of
            samples, those that differ are None.
        baseline: name of the contender without a strategy that speed and output are compared with.
    """

    strategy: str
    batch_size: int
    prompts: list[int]
    category: str
    seconds: float
    rows: list[list[int]]
    row_steps: int
    stats: SpecStats | None = None
    agreement: Sequence[Agreement | None] | None = None
    baseline: str = BASELINE.name

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.rows))


@dataclass(repr=False)
class BenchResult:
    """What :func:`hf_spec.benchmark` and ``hf-spec bench`` have measured; ``print`` shows a table.

    Attributes:
        prompts: the prompts that were measured.
        contenders: plain ``generate`` and the strategies, with their arguments.
        settings: arguments of the calls, JSON types.
        measurements: one per batch and strategy.
        notes: what is to be known of the figures, such as prompts that were cut.
        truncated_prompts: number of these.
        interrupted: whether the run was ended by an interrupt, after these measurements.
    """

    prompts: list[Prompt]
    contenders: list[Contender]
    settings: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    truncated_prompts: int = 0
    interrupted: bool = False

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The figures: a row per batch size, strategy and task, in order of appearance, where task
        ``all`` is the last one of a strategy. ``runs`` in ``results.json`` has the same.

        - ``strategy``, ``task``, ``batch_size``: what was measured; ``generate`` is plain
          ``generate``, and ``task`` the category of prompts.
        - ``baseline``: the row's plain ``generate``, to which ``speedup`` and agreement refer.
        - ``prompts``, ``new_tokens``, ``seconds``, ``tokens_per_second``: sequences, their new
          tokens, wall-clock time in ``generate``, and the ratio of the two before.
        - ``speedup``: ``tokens_per_second`` divided by that of the baseline on the same prompts.
        - ``tau``: new tokens per forward pass and unfinished sequence, the prefill included.
        - ``speedup_interval``, ``tau_interval``: ends of the 95% interval; None for fewer than five
          batches.
        - ``identical``, ``diverged_at_tie``, ``diverged``: number of sequences that equal the
          baseline's, that differ from a tie of two tokens on, and that differ otherwise. Under
          sampling ``identical`` is counted at batch size 1, where all draw the same random numbers;
          the others are None if a sequence differs, and all are None in batches.
        - ``synthetic_acceptance``: rates that drafts were accepted at, so that outputs are not the
          model's; else None.
        - ``stats``: a dict: the summed :class:`hf_spec.SpecStats`, and the ``share`` of time in
          each phase; counts alone for plain ``generate`` and features of Transformers.
        """
        groups: dict[tuple[int, str, str], list[Measurement]] = {}
        for name in dict.fromkeys((item.batch_size, item.strategy) for item in self.measurements):
            calls = [one for one in self.measurements if (one.batch_size, one.strategy) == name]
            for task in dict.fromkeys(item.category for item in calls):
                groups[(*name, task)] = [item for item in calls if item.category == task]
            groups[(*name, ALL)] = calls
        synthetic = self.settings.get("synthetic_acceptance")
        return [
            {
                "strategy": strategy, "task": task, "batch_size": size,
                "baseline": group[0].baseline,
                "synthetic_acceptance": None if strategy == group[0].baseline else synthetic,
                **_figures(group, groups[size, group[0].baseline, task]),
            }
            for (size, strategy, task), group in groups.items()
        ]  # fmt: skip

    def overall(self, strategy: str) -> dict[str, Any]:
        """The entry of a contender, by its name, over all tasks, at the last batch size."""
        return {row["strategy"]: row for row in self.rows if row["task"] == ALL}[strategy]

    def __str__(self) -> str:
        return described(self, by_task=True)

    def __repr__(self) -> str:
        """The speedups in one line."""
        rows = [row for row in self.rows if row["task"] == ALL]
        speeds = (f"{row['strategy']}={row['speedup']:.2f}x" for row in rows)
        return f"BenchResult({', '.join(speeds)})"

    def to_pandas(self) -> Any:
        """:attr:`rows` as a ``pandas.DataFrame``, without ``stats``.

        Raises:
            ImportError: pandas is not installed.
        """
        from pandas import DataFrame

        return DataFrame(self.rows).drop(columns="stats", errors="ignore")

    def plot(self, axes: Any = None) -> Any:
        """Bars of the speedups over all tasks, with their 95% intervals.

        Args:
            axes: a matplotlib ``Axes`` to draw into; None makes a figure.

        Returns:
            The ``Axes``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return plotted(self, axes)


def _figures(group: Sequence[Measurement], base: Sequence[Measurement]) -> dict[str, Any]:
    """What the measurements of a strategy amount to, beside those of its baseline."""
    tokens, seconds = [m.new_tokens for m in group], [m.seconds for m in group]
    steps = [m.row_steps for m in group]
    plain = [m.new_tokens for m in base], [m.seconds for m in base]
    speed = sum(tokens) / sum(seconds)
    return {
        "prompts": sum(len(m.rows) for m in group), "new_tokens": sum(tokens),
        "seconds": sum(seconds), "tokens_per_second": speed,
        "speedup": speed * sum(plain[1]) / sum(plain[0]) if any(plain[0]) else 0.0,
        "speedup_interval": None if group is base else interval(_speedup, tokens, seconds, *plain),
        "tau": sum(tokens) / sum(steps) if any(steps) else 0.0,
        "tau_interval": interval(truediv, tokens, steps),
        **_agreements(group), "stats": _stats(group),
    }  # fmt: skip


def _agreements(group: Sequence[Measurement]) -> dict[str, int | None]:
    """Numbers of sequences by how they agree with the baseline's; None where that is unknown."""
    known = [one.agreement for one in group if one.agreement is not None]
    found = [one for agreement in known for one in agreement]
    counts: dict[str, int | None] = {kind.value: found.count(kind) for kind in Agreement}
    if len(known) < len(group):
        return dict.fromkeys(counts)
    if None in found:  # of samples
        return dict.fromkeys(counts) | {Agreement.IDENTICAL.value: counts[Agreement.IDENTICAL]}
    return counts


def _speedup(tokens: Any, seconds: Any, plain_tokens: Any, plain_seconds: Any) -> Any:
    return tokens / seconds / (plain_tokens / plain_seconds)


def _stats(group: Sequence[Measurement]) -> dict[str, Any]:
    """The summed statistics, with the share of wall-clock time of each phase.

    ``share["generate"]`` is the share that ``generate`` spends before and after the decoding loop.
    Plain decoding and stock strategies have only counts, no phases.
    """
    total = SpecStats()
    for item in group:
        if item.stats is None:
            return {
                "num_row_steps": sum(item.row_steps for item in group),
                "num_generated_tokens": sum(item.new_tokens for item in group),
            }
        total.merge(item.stats)
    seconds = sum(item.seconds for item in group)
    share = {phase: getattr(total, f"{phase}_seconds") / seconds for phase in (*PHASES, "other")}
    share["generate"] = 1.0 - sum(share.values())
    return {**total.to_dict(), "share": share}
