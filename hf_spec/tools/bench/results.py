"""Results of benchmarks: agreement of texts, figures, tables and files."""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import truediv
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from hf_spec.core.stats import PHASES, SpecStats
from hf_spec.files import write_json
from hf_spec.target.hidden_states import supported_kwargs
from hf_spec.tools.bench.contenders import BASELINE, Contender
from hf_spec.tools.bench.prompts import Prompt
from hf_spec.tools.data import ALL

# -- Compares greedy outputs and tells ties from real differences ----------------------------------

#: Two logits count as tied when they differ by at most this many units in the last place of the
#: run's dtype, at the larger one's magnitude. One forward over n tokens and n forwards over one
#: token add the same numbers in another order, and every layer rounds to the dtype: on a 12-layer
#: model in bfloat16 that moved the gap between the top two logits by 0 units at the median, by 2 at
#: the 99.9th percentile and by 3 at most over 1,272 positions.
TIE_ULPS = 4


class Agreement(StrEnum):
    """How the output for one prompt compares with that of plain ``generate``."""

    IDENTICAL = "identical"
    DIVERGED_AT_TIE = "diverged_at_tie"
    DIVERGED = "diverged"


def ulp(value: float, dtype: torch.dtype) -> float:
    """Unit in the last place: distance between neighboring numbers of ``dtype`` near ``value``."""
    near = torch.tensor(abs(value), dtype=dtype)
    return float(torch.nextafter(near, torch.full_like(near, torch.inf)) - near)


def is_tie(scores: torch.Tensor, ours: int, plain: int, dtype: torch.dtype) -> bool:
    """Whether the logits of both tokens are within `TIE_ULPS` of the largest one; ``scores``
    ``(vocab,)`` are logits after the processors, ``dtype`` is what the model computes in."""
    best = scores.max().item()
    worse = min(scores[ours].item(), scores[plain].item())
    return best - worse <= TIE_ULPS * ulp(max(abs(best), abs(worse)), dtype)


def classify(
    model: Any, prompt: Sequence[int], ours: Sequence[int], plain: Sequence[int],
    repetition_penalty: float | None = None,
) -> Agreement:  # fmt: skip
    """Compare the new tokens for one prompt with those of plain ``generate``, of which the adapters
    are active.

    At the first difference, one forward pass over the prompt and the tokens both have in common
    gives the logits that decide whether it is a tie. An output that merely ends earlier or later is
    never a tie.
    """
    if list(ours) == list(plain):
        return Agreement.IDENTICAL
    index = next((i for i, (a, b) in enumerate(zip(ours, plain)) if a != b), None)
    if index is None:  # one of them has ended
        return Agreement.DIVERGED
    prefix = torch.tensor([[*prompt, *plain[:index]]], device=model.device)  # (1, seq)
    scores = next_token_logits(model, prefix)
    if repetition_penalty is not None:
        penalize = RepetitionPenaltyLogitsProcessor(float(repetition_penalty))
        scores = penalize(prefix, scores[None])[0]
    tie = is_tie(scores, ours[index], plain[index], model.dtype)
    return Agreement.DIVERGED_AT_TIE if tie else Agreement.DIVERGED


def next_token_logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Next-token logits ``(vocab,)`` after ``input_ids`` ``(1, seq)``, as ``generate`` sees them:
    float32, or float64 if the model computes in it."""
    few = supported_kwargs(model, logits_to_keep=1)  # a long prefix would need seq x vocab logits
    with torch.no_grad():
        logits = model(input_ids, use_cache=False, **few).logits[0, -1]
    return logits if logits.dtype == torch.float64 else logits.float()


# -- Measurements of a run, and what they amount to per strategy and task --------------------------
#
# Intervals are percentiles of the bootstrap: other prompts of the same kind would give other
# figures, and resampling the measured ones, with the results of all contenders on each, estimates
# by how much (Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 8 and 13).

#: Share of the resampled figures that lie within an interval.
CONFIDENCE = 0.95
#: Fewest units that an interval is computed from.
FEWEST = 5
RESAMPLES = 2000
#: Figures that are means over the groups of a suite.
WEIGHED = ("speedup", "tau", "tau_without_prefill")

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
        - ``tau_without_prefill``: the same of what follows the prefill and its token, as most
          published figures count; 0 if nothing does.
        - ``speedup_interval``, ``tau_interval``: ends of the 95% interval; None for fewer than five
          batches.
        - ``identical``, ``diverged_at_tie``, ``diverged``: number of sequences that equal the
          baseline's, that differ from a tie of two tokens on, and that differ otherwise. Under
          sampling ``identical`` is counted at batch size 1, where all draw the same random numbers;
          the others are None if a sequence differs, and all are None in batches.
        - ``synthetic_acceptance``: rates that drafts were accepted at, so that outputs are not the
          model's; else None.
        - Of a suite (``hf-spec bench --suite``), :data:`WEIGHED` figures of task ``all`` are the
          mean over the groups, without intervals.
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
        found = [
            {
                "strategy": strategy, "task": task, "batch_size": size,
                "baseline": group[0].baseline,
                "synthetic_acceptance": None if strategy == group[0].baseline else synthetic,
                **_figures(group, groups[size, group[0].baseline, task]),
            }
            for (size, strategy, task), group in groups.items()
        ]  # fmt: skip
        if self.protocol is not None:
            _weigh(found)
        return found

    @property
    def protocol(self) -> dict[str, Any] | None:
        """What is recorded of a suite, whose groups have the same weight; None if there is none."""
        return self.settings.get("protocol")

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
        """Bars of the speedups over all tasks, with their 95% intervals; of a suite, bars of tau
        without the prefill, by group.

        Args:
            axes: a matplotlib ``Axes`` to draw into; None makes a figure.

        Returns:
            The ``Axes``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib import pyplot

        rows = [row for row in self.rows if row["strategy"] != row["baseline"]]
        if axes is None:
            size = None if self.protocol is None else (11, 4.5)
            axes = pyplot.subplots(layout="constrained", figsize=size)[1]
        if self.protocol is not None:
            return _bars_by_group(axes, rows)
        rows = [row for row in rows if row["task"] == ALL]
        sizes = len({row["batch_size"] for row in rows}) > 1
        for place, row in enumerate(rows):
            low, high = row["speedup_interval"] or (row["speedup"], row["speedup"])
            ends = [[max(row["speedup"] - low, 0)], [max(high - row["speedup"], 0)]]
            axes.barh(place, row["speedup"], xerr=ends, capsize=3, color="C0")
            axes.text(0, place, f" tau {row['tau']:.2f}", va="center", color="white")
        names = [row["strategy"] + f", batch {row['batch_size']}" * sizes for row in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xlabel("tokens per second, relative to plain generate")
        return axes


def _bars_by_group(axes: Any, rows: Sequence[dict[str, Any]]) -> Any:
    """Bars of tau without the prefill for each group of a suite, beside their mean."""
    tasks = [*dict.fromkeys(row["task"] for row in rows if row["task"] != ALL), ALL]
    names = dict.fromkeys((row["strategy"], row["batch_size"]) for row in rows)
    several = len({size for _, size in names}) > 1
    width = 0.8 / max(len(names), 1)
    for number, (name, size) in enumerate(names):
        own = [row for row in rows if (row["strategy"], row["batch_size"]) == (name, size)]
        taus = {row["task"]: row["tau_without_prefill"] for row in own}
        places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(tasks))]
        label = name + f", batch {size}" * several
        axes.bar(places, [taus.get(task, 0.0) for task in tasks], width, label=label)
    axes.set_xticks(range(len(tasks)), [*tasks[:-1], "mean"])
    axes.axhline(1, color="black", linewidth=1)
    axes.set_ylabel("tau, without the prefill")
    axes.legend(fontsize="small", ncols=2)
    return axes


def write_chart(path: Path, result: BenchResult) -> None:
    """Write :meth:`BenchResult.plot` as a file; an ImportError if matplotlib is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    result.plot(figure.subplots())
    figure.savefig(path)


def _weigh(rows: Sequence[dict[str, Any]]) -> None:
    """Let each group of a suite have the same weight in the rows of all of them."""
    for row in rows:
        if row["task"] == ALL:
            named = ("strategy", "batch_size")
            own = [one for one in rows if all(one[key] == row[key] for key in named)]
            for figure in WEIGHED:
                row[figure] = mean(one[figure] for one in own if one is not row)
                row[f"{figure}_interval"] = None


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
        "tau_without_prefill": _without_prefill(group),
        **_agreements(group), "stats": _stats(group),
    }  # fmt: skip


def _without_prefill(group: Sequence[Measurement]) -> float:
    """Tokens per forward pass, of each sequence without the first of both."""
    rows = sum(len(m.rows) for m in group)
    steps = sum(m.row_steps for m in group) - rows
    return (sum(m.new_tokens for m in group) - rows) / steps if steps else 0.0


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


# -- Shows results as a table, and writes ``results.json`` -----------------------------------------


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Lines of a table, in which nothing is cut or wrapped: the first ``words`` columns stand to
    the left, the others, of numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]

    def line(cells: Sequence[str]) -> str:
        sides = [str.ljust] * words + [str.rjust] * (len(widths) - words)
        return "  ".join(side(cell, n) for side, cell, n in zip(sides, cells, widths)).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, rows)])


def described(result: BenchResult, by_task: bool = False, phases: bool = True) -> str:
    """The results as text, with ``by_task`` of each task, with ``phases`` the share of time in each
    phase, and the notes. Intervals are left out where the terminal is too narrow for them."""
    if not result.measurements:
        return "\n".join(["nothing was measured", *(f"note: {note}" for note in result.notes)])
    data = result.rows
    lines = [_fitting_table(result, data, by_task)]
    several = len({row["batch_size"] for row in data}) > 1
    for row in data:
        share = row["stats"].get("share")
        if phases and row["task"] == ALL and share:
            named = {"generate": "rest of generate()"}
            parts = ", ".join(f"{named.get(key, key)} {part:.0%}" for key, part in share.items())
            size = f", batch {row['batch_size']}" if several else ""
            lines.append(f"time of {row['strategy']}{size}: {parts}")
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])


def _fitting_table(result: BenchResult, data: list[dict[str, Any]], by_task: bool) -> str:
    """The table, with intervals where they are known and the terminal has room for them."""
    if result.protocol is not None:
        return _table_of_groups(result, data)
    text = _table(result, data, by_task, any(row["tau_interval"] for row in data))
    if sys.stdout.isatty() and max(map(len, text.splitlines())) > shutil.get_terminal_size()[0]:
        text = _table(result, data, by_task, intervals=False)
    return text


def _table_of_groups(result: BenchResult, data: list[dict[str, Any]]) -> str:
    """A suite's table: tau without the prefill by group, their mean, and that with the prefill."""
    protocol, settings = result.protocol or {}, result.settings
    groups = [*dict.fromkeys(row["task"] for row in data if row["task"] != ALL)]
    several = len({row["batch_size"] for row in data}) > 1
    how = "greedy"
    if settings.get("do_sample"):
        how = f"sampled, temperature {settings.get('temperature', 'the default')}"
    counts = ", ".join(
        f"{group} {sum(one.category == group for one in result.prompts)}" for group in groups
    )
    title = (
        f"{protocol['suite']}: {settings['max_new_tokens']} new tokens at most, {how}; prompts: "
        f"{counts}\ntau by group, without the prefill; mean: of the groups, each of the same weight"
    )
    rows = []
    for name, size in dict.fromkeys((row["strategy"], row["batch_size"]) for row in data):
        own = {
            row["task"]: row for row in data
            if (row["strategy"], row["batch_size"]) == (name, size)
        }  # fmt: skip
        every = own[ALL]
        taus = [f"{own[task]['tau_without_prefill']:.2f}" for task in (*groups, ALL)]
        rows.append([
            name, *[str(size)] * several, *taus, f"{every['tau']:.2f}",
            f"{every['speedup']:.2f}x", _agreement(every),
        ])  # fmt: skip
    heads = ["strategy", *["batch"] * several, *groups, "mean", "with prefill", "speedup", "output"]
    return f"{title}\n{aligned(heads, rows, 1)}"


def _table(result: BenchResult, data: list[dict[str, Any]], by_task: bool, intervals: bool) -> str:
    lossy = {item.name for item in result.contenders if item.lossy}
    tasks, sizes = {row["task"] for row in data}, {row["batch_size"] for row in data}
    by_task = by_task and len(tasks) > 2  # a single task has the same figures as "all"
    count = max(row["prompts"] for row in data)
    known = any(row["speedup_interval"] or row["tau_interval"] for row in data)
    title = (
        f"{count} prompt{'s' * (count != 1)}, "
        f"{result.settings['max_new_tokens']} new tokens each at most"
        f"{'; 95% intervals in brackets' * (intervals and known)}"
    )
    if rates := result.settings.get("synthetic_acceptance"):
        shown = ", ".join(f"{rate:g}" for rate in rates)
        title += (
            f"\nsynthetic acceptance at rates of {shown}, whatever the drafts are: speeds are "
            "measured,\nbut outputs and tau are not the model's"
        )
    words = ["strategy", *["task"] * by_task, *["batch"] * (len(sizes) > 1)]
    rows = []
    for row in data:
        if row["task"] != ALL and not by_task:
            continue
        speed, tau = f"{row['speedup']:.2f}x", f"{row['tau']:.2f}"
        if intervals:
            speed += _shown(row["speedup_interval"])
            tau += _shown(row["tau_interval"])
        names = {"task": row["task"], "batch": str(row["batch_size"])}
        name = row["strategy"] + " (lossy)" * (row["strategy"] in lossy)
        rows.append([
            name, *(names[word] for word in words[1:]), f"{row['tokens_per_second']:.1f}",
            speed, tau, _agreement(row),
        ])  # fmt: skip
    table = aligned([*words, "tokens/s", "speedup", "tau", "output"], rows, len(words))
    return f"{title}\n{table}"


def _agreement(row: dict[str, Any]) -> str:
    """How many outputs are those of plain decoding, and how many are not."""
    if row["synthetic_acceptance"]:
        return "not the model's"
    same, ties, others = (row[kind.value] for kind in Agreement)
    if same is None:
        return "sampled"
    counts = {"identical": same, "at ties": ties, "diverged": others}
    return ", ".join(f"{n} {kind}" for kind, n in counts.items() if n or kind == "identical")


def _shown(found: Interval | None) -> str:
    return "" if found is None else f" ({found[0]:.2f}-{found[1]:.2f})"


def write_results(path: Path, result: BenchResult, environment: dict[str, Any]) -> None:
    """Write ``results.json``: the environment, the figures (``runs``), and the measurements of each
    call (``calls``), so that other figures can be compared prompt by prompt."""
    facts = ("settings", "truncated_prompts", "interrupted", "notes")
    environment = {**environment, **{name: getattr(result, name) for name in facts}}
    names = ("strategy", "batch_size", "prompts", "seconds", "new_tokens", "row_steps")
    calls = [{name: getattr(one, name) for name in names} for one in result.measurements]
    data = {"environment": environment, "runs": result.rows, "calls": calls}
    write_json(path, data)
