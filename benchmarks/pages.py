"""Markdown tables of what ``hf-spec bench`` has measured, for :mod:`all`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_spec.tools.bench.contenders import COMPILED
from hf_spec.tools.data import ALL

Row = dict[str, Any]


def cell(run: Row | None) -> str:
    """Speed over plain generation, tau, and the interval of the speed."""
    if run is None:
        return ""
    ends = run["speedup_interval"]
    between = "" if ends is None else f", {ends[0]:.2f}-{ends[1]:.2f}"
    return f"{run['speedup']:.2f}x ({run['tau']:.2f}){between}"


def rows_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def overall(results: Row) -> dict[str, Row]:
    """Runs over all tasks by contender."""
    return {run["strategy"]: run for run in results["runs"] if run["task"] == ALL}


def by_column(results: Sequence[Row], heads: Sequence[str]) -> list[str]:
    """A row per contender, a column per result."""
    columns = [overall(one) for one in results]
    names = dict.fromkeys(name for column in columns for name in column)

    def shown(run: Row | None) -> str:
        plain = run is not None and run["baseline"] == run["strategy"]
        return f"{run['tokens_per_second']:.1f} tokens/s" if run and plain else cell(run)

    rows = [[f"`{name}`", *(shown(column.get(name)) for column in columns)] for name in names]
    return rows_of(["", *heads], rows)


def by_task(results: Sequence[Row], heads: Sequence[str]) -> list[str]:
    """A row per task, a column per contender."""
    (result,) = results
    runs = {(run["task"], run["strategy"]): run for run in result["runs"]}
    names = [name for name, run in overall(result).items() if run["baseline"] != name]
    tasks = list(dict.fromkeys(task for task, _ in runs if task != ALL))
    rows = [[task, *(cell(runs.get((task, name))) for name in names)] for task in [*tasks, ALL]]
    return rows_of(["task", *(f"`{name}`" for name in names)], rows)


def by_strategy(results: Sequence[Row], heads: Sequence[str]) -> list[str]:
    """A row per contender, eager beside compiled."""
    (result,) = results
    runs = overall(result)
    rows = []
    for name, run in runs.items():
        if name.endswith(COMPILED):
            continue
        both = [run, runs.get(f"{name}{COMPILED}")]
        rates = ["" if one is None else f"{one['tokens_per_second']:.1f}" for one in both]
        rows.append([f"`{name}`", *(part for pair in zip(rates, map(cell, both)) for part in pair)])
    head = ["", "tokens/s", "eager", "tokens/s", "compiled"]
    return rows_of(head, rows)


def agreement(results: Sequence[Row]) -> str:
    """How many greedy outputs are those of plain generation."""
    runs = [run for one in results for run in overall(one).values()]
    runs = [run for run in runs if run["baseline"] != run["strategy"]]
    kinds = ("identical", "diverged_at_tie", "diverged")
    if any(run[kind] is None for run in runs for kind in kinds):
        return ""
    same, ties, others = (sum(run[kind] for run in runs) for kind in kinds)
    return (
        f"Outputs: {same} as in plain generation, {ties} different at a tie, {others} different "
        "otherwise."
    )


def environment(results: Sequence[Row]) -> str:
    """Where and when a table was measured."""
    about = results[-1]["environment"]
    where = about["cpu"] if about["device"] == "cpu" else about["device_name"]
    packages = ", ".join(f"{name} {about[name]}" for name in ("hf_spec", "transformers", "torch"))
    revision = f" ({about['git_revision'][:9]})" if about["git_revision"] else ""
    threads = f"{about['threads']} thread{'s' * (about['threads'] != 1)}"
    return f"{where}, {threads}, {about['dtype']}; {packages}{revision}; {about['date'][:10]}."
