"""Shows results as a table and as a figure, and writes ``results.json``. Measures nothing and loads
no model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_spec.files import write_json
from hf_spec.tools.bench.agreement import Agreement
from hf_spec.tools.data import ALL

if TYPE_CHECKING:
    from hf_spec.tools.bench.results import BenchResult, Interval


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
    measured = any(row["tau_interval"] for row in data)
    text = _table(result, data, by_task, intervals=measured)
    if sys.stdout.isatty() and max(map(len, text.splitlines())) > shutil.get_terminal_size()[0]:
        text = _table(result, data, by_task, intervals=False)
    lines = [text]
    several = len({row["batch_size"] for row in data}) > 1
    for row in data:
        share = row["stats"].get("share")
        if phases and row["task"] == ALL and share:
            parts = ", ".join(f"{phase} {part:.0%}" for phase, part in share.items())
            size = f", batch {row['batch_size']}" if several else ""
            lines.append(f"time of {row['strategy']}{size}: {parts}")
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])


def plotted(result: BenchResult, axes: Any = None) -> Any:
    """Bars of speedups over all tasks, with their intervals; see :meth:`BenchResult.plot`."""
    from matplotlib import pyplot

    rows = [row for row in result.rows if row["task"] == ALL and row["strategy"] != row["baseline"]]
    axes = pyplot.subplots(layout="constrained")[1] if axes is None else axes
    sizes = len({row["batch_size"] for row in rows}) > 1
    for place, row in enumerate(rows):
        low, high = row["speedup_interval"] or (row["speedup"], row["speedup"])
        ends = [[max(row["speedup"] - low, 0)], [max(high - row["speedup"], 0)]]
        axes.barh(place, row["speedup"], xerr=ends, capsize=3, color="C0")
        axes.text(0, place, f" tau {row['tau']:.2f}", va="center", color="white")
    names = [
        f"{row['strategy']}, batch {row['batch_size']}" * sizes or row["strategy"] for row in rows
    ]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("tokens per second, relative to plain generate")
    return axes


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
