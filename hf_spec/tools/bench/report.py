"""Shows results as a table and writes ``results.json``. Measures nothing and loads no model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_spec.files import write_atomically
from hf_spec.tools.bench.agreement import Agreement
from hf_spec.tools.bench.results import ALL, BenchResult, Interval

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def new_table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """An empty table, in which nothing is cut or wrapped: columns of words, then of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in words:
        table.add_column(head, no_wrap=True)
    for head in numbers:
        table.add_column(head, no_wrap=True, justify="right")
    return table


def show(table: Table, console: Console) -> None:
    """Print a table as wide as it is; a narrower terminal wraps its lines."""
    console.width = max(console.width, _width(table, console))
    console.print(table)


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def print_table(result: BenchResult, console: Console, by_task: bool = False) -> None:
    """Print the results, with ``by_task`` of each task, the share of time in each phase, and the
    notes. Intervals are left out where the terminal is too narrow for them."""
    data = result.runs()
    table = _table(result, data, by_task, intervals=True)
    if console.is_terminal and _width(table, console) > console.width:
        table = _table(result, data, by_task, intervals=False)
    show(table, console)
    several = len({row["batch_size"] for row in data}) > 1
    for row in data:
        share = row["stats"].get("share")
        if row["task"] == ALL and share:
            parts = ", ".join(f"{phase} {part:.0%}" for phase, part in share.items())
            size = f", batch {row['batch_size']}" if several else ""
            console.print(f"time of {row['strategy']}{size}: {parts}", soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _table(
    result: BenchResult, data: list[dict[str, Any]], by_task: bool, intervals: bool
) -> Table:
    lossy = {item.name for item in result.contenders if item.lossy}
    tasks, sizes = {row["task"] for row in data}, {row["batch_size"] for row in data}
    by_task = by_task and len(tasks) > 2  # a single task has the same figures as "all"
    count = max(row["prompts"] for row in data)
    title = (
        f"{count} prompt{'s' * (count != 1)}, "
        f"{result.settings['max_new_tokens']} new tokens each at most"
        f"{'; 95% intervals in brackets' * intervals}"
    )
    words = ["strategy", *["task"] * by_task, *["batch"] * (len(sizes) > 1)]
    table = new_table(title, words, ["tokens/s", "speedup", "tau", "output"])
    for row in data:
        if row["task"] != ALL and not by_task:
            continue
        speed, tau = f"{row['speedup']:.2f}x", f"{row['tau']:.2f}"
        if intervals:
            speed += _shown(row["speedup_interval"])
            tau += _shown(row["tau_interval"])
        names = {"task": row["task"], "batch": str(row["batch_size"])}
        table.add_row(
            row["strategy"] + " (lossy)" * (row["strategy"] in lossy),
            *(names[word] for word in words[1:]),
            f"{row['tokens_per_second']:.1f}", speed, tau, _agreement(row),
            end_section=by_task and row["task"] == ALL,
        )  # fmt: skip
    return table


def _agreement(row: dict[str, Any]) -> str:
    """How many outputs are those of plain decoding, and how many are not."""
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
    data = {"environment": environment, "runs": result.runs(), "calls": calls}
    write_atomically(path, json.dumps(data, indent=1))
