"""Shows results as a table and writes ``results.json``. Measures nothing and loads no model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_spec.bench.agreement import Agreement
from hf_spec.bench.results import ALL, BenchResult, Interval
from hf_spec.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Least width of the table in characters; a narrower terminal wraps its lines.
TABLE_WIDTH = 132


def new_table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """An empty table: columns of words first, then columns of numbers, aligned right."""
    from rich.table import Table

    table = Table(*words, title=title)
    for head in numbers:
        table.add_column(head, justify="right")
    return table


def print_table(result: BenchResult, console: Console) -> None:
    """Print the results, the share of time in each phase, and the notes."""
    data = result.runs()
    lossy = {item.name for item in result.contenders if item.lossy}
    tasks, sizes = {row["task"] for row in data}, {row["batch_size"] for row in data}
    heads = (
        "batch", "prompts", "tokens/s", "speedup", "95%", "tau", "95%", "identical", "at tie",
        "diverged",
    )  # fmt: skip
    title = f"{result.settings['max_new_tokens']} new tokens per prompt at most"
    table = new_table(title, ("strategy", "task"), heads)
    for row in data:
        # A single task has the same figures as "all".
        if row["task"] != ALL and len(tasks) == 2:
            continue
        counts = [row[kind.value] for kind in Agreement]
        shown = ["sampled" if count is None else str(count) for count in counts]
        table.add_row(
            row["strategy"] + " (lossy)" * (row["strategy"] in lossy), row["task"],
            str(row["batch_size"]), str(row["prompts"]),
            f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f}x",
            _shown(row["speedup_interval"]), f"{row['tau']:.2f}", _shown(row["tau_interval"]),
            *shown, end_section=row["task"] == ALL,
        )  # fmt: skip
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)
    for row in data:
        share = row["stats"].get("share")
        if row["task"] == ALL and share:
            parts = ", ".join(f"{phase} {part:.0%}" for phase, part in share.items())
            size = f", batch {row['batch_size']}" if len(sizes) > 1 else ""
            console.print(f"time of {row['strategy']}{size}: {parts}", soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _shown(found: Interval | None) -> str:
    return "" if found is None else f"{found[0]:.2f}-{found[1]:.2f}"


def write_results(path: Path, result: BenchResult, environment: dict[str, Any]) -> None:
    """Write ``results.json`` atomically.

    ``calls`` has the measurements of each call, so that other figures can be compared prompt by
    prompt.

    Args:
        path: the file.
        result: the measurements.
        environment: see :func:`hf_spec.bench.environment.environment_of`.
    """
    environment = {
        **environment,
        "settings": result.settings,
        "truncated_prompts": result.truncated_prompts,
        "interrupted": result.interrupted,
        "notes": result.notes,
    }
    names = ("strategy", "batch_size", "prompts", "seconds", "new_tokens", "row_steps")
    calls = [{name: getattr(one, name) for name in names} for one in result.measurements]
    data = {"environment": environment, "runs": result.runs(), "calls": calls}
    write_atomically(path, json.dumps(data, indent=1))
