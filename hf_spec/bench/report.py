"""Turns measurements into a table and ``results.json``. Measures nothing and loads no model."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from operator import truediv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import hf_spec
from hf_spec.bench.agreement import Agreement
from hf_spec.bench.intervals import Interval, interval
from hf_spec.core.stats import SpecStats
from hf_spec.files import write_atomically
from hf_spec.policy.devices import cpu_name, device_name

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hf_spec.bench.runner import BenchResult, Measurement

#: Least width of the table in characters; a narrower terminal wraps its lines.
TABLE_WIDTH = 132
PHASES = ("draft", "forward", "verify", "other")
ALL = "all"


def rows(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One entry per batch size, strategy and task, in order of appearance; task ``all`` comes last.

    Returns:
        The entries of ``runs`` in ``results.json``. ``speedup`` is the ratio of tokens per second
        to those of the baseline on the same prompts. ``tau`` is the number of new tokens per
        forward pass and unfinished sequence, the prefill included. ``speedup_interval`` and
        ``tau_interval`` are 95% intervals (:mod:`hf_spec.bench.intervals`), None for too few
        measurements. ``identical``, ``diverged_at_tie`` and ``diverged`` count sequences; they are
        None under sampling.
    """
    groups: dict[tuple[int, str, str], list[Measurement]] = {}
    for name in dict.fromkeys((item.batch_size, item.strategy) for item in measurements):
        own = [item for item in measurements if (item.batch_size, item.strategy) == name]
        for task in dict.fromkeys(item.category for item in own):
            groups[(*name, task)] = [item for item in own if item.category == task]
        groups[(*name, ALL)] = own
    result = []
    for (batch_size, strategy, task), group in groups.items():
        base = groups[batch_size, group[0].baseline, task]
        speed, plain = _speed(group), _speed(base)
        tokens, row_steps = sum(m.new_tokens for m in group), sum(m.row_steps for m in group)
        made, steps = [m.new_tokens for m in group], [m.row_steps for m in group]
        pairs: list[list[float]] = [[m.new_tokens for m in base], [m.seconds for m in base]]
        result.append(
            {
                "strategy": strategy,
                "task": task,
                "batch_size": batch_size,
                "baseline": group[0].baseline,
                "prompts": sum(len(item.rows) for item in group),
                "new_tokens": tokens,
                "seconds": sum(item.seconds for item in group),
                "tokens_per_second": speed,
                "speedup": speed / plain if plain else 0.0,
                "speedup_interval": interval(_speedup, made, [m.seconds for m in group], *pairs)
                if strategy != group[0].baseline
                else None,
                "tau": tokens / row_steps if row_steps else 0.0,
                "tau_interval": interval(truediv, made, steps),
                **{kind.value: _agreeing(group, kind) for kind in Agreement},
                "stats": _stats(group),
            }
        )
    return result


def _speedup(tokens: Any, seconds: Any, plain_tokens: Any, plain_seconds: Any) -> Any:
    return tokens / seconds / (plain_tokens / plain_seconds)


def _speed(group: Sequence[Measurement]) -> float:
    return sum(item.new_tokens for item in group) / sum(item.seconds for item in group)


def _agreeing(group: Sequence[Measurement], kind: Agreement) -> int | None:
    counts = [m.agreement.count(kind) for m in group if m.agreement is not None]
    return sum(counts) if len(counts) == len(group) else None


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
    share = {phase: getattr(total, f"{phase}_seconds") / seconds for phase in PHASES}
    share["generate"] = 1.0 - sum(share.values())
    return {**total.to_dict(), "share": share}


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
            _label(row, lossy), row["task"], str(row["batch_size"]), str(row["prompts"]),
            f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f}x",
            _shown(row["speedup_interval"]), f"{row['tau']:.2f}", _shown(row["tau_interval"]),
            *shown, end_section=row["task"] == ALL,
        )  # fmt: skip
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)
    if len(sizes) > 1:
        _print_grid(data, lossy, console)
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


def _print_grid(data: Sequence[dict[str, Any]], lossy: set[str], console: Console) -> None:
    """Print speedup and tau by strategy and batch size; for plain decoding, tokens per second."""
    sizes = sorted({row["batch_size"] for row in data})
    table = new_table(
        "speedup (tau) by batch size", ["strategy"], [f"batch {size}" for size in sizes]
    )
    lines: dict[str, dict[int, str]] = {}
    for row in data:
        if row["task"] == ALL:
            plain = row["strategy"] == row["baseline"]
            rate, gain = f"{row['tokens_per_second']:.1f} tok/s", f"{row['speedup']:.2f}x"
            shown = rate if plain else f"{gain} ({row['tau']:.2f})"
            lines.setdefault(_label(row, lossy), {})[row["batch_size"]] = shown
    for label, by_size in lines.items():
        table.add_row(label, *(by_size.get(size, "") for size in sizes))
    console.print(table)


def _label(row: dict[str, Any], lossy: set[str]) -> str:
    return row["strategy"] + " (lossy)" * (row["strategy"] in lossy)


def write_results(path: Path, result: BenchResult, environment: dict[str, Any]) -> None:
    """Write ``results.json`` atomically.

    Args:
        path: the file.
        result: the measurements.
        environment: see :func:`environment`.
    """
    environment = {
        **environment,
        "settings": result.settings,
        "truncated_prompts": result.truncated_prompts,
        "interrupted": result.interrupted,
        "notes": result.notes,
    }
    write_atomically(
        path,
        json.dumps(
            {"environment": environment, "runs": result.runs(), "calls": _calls(result)}, indent=1
        ),
    )


def _calls(result: BenchResult) -> list[dict[str, Any]]:
    """The measurements of each call, so that other figures can be compared prompt by prompt."""
    return [
        {
            "strategy": one.strategy, "batch_size": one.batch_size, "prompts": one.prompts,
            "seconds": one.seconds, "new_tokens": one.new_tokens, "row_steps": one.row_steps,
        }
        for one in result.measurements
    ]  # fmt: skip


def environment(model: Any, model_name: str, prompt_file: str | Path | None) -> dict[str, Any]:
    """The environment of a run: versions, machine, model, prompts, command line.

    Args:
        model: the model.
        model_name: its name, as the user gave it.
        prompt_file: the prompt file; None if there is none.
    """
    device = model.device
    prompts = None if prompt_file is None else Path(prompt_file).read_bytes()
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "transformers", "peft", "hf_spec")},
        "device": str(device),
        "device_name": device_name(device),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attn_implementation": getattr(model.config, "_attn_implementation", None),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_revision": _git_revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model_name,
        "prompts": None if prompt_file is None else str(prompt_file),
        "prompts_sha256": None if prompts is None else hashlib.sha256(prompts).hexdigest(),
    }


def package_version(distribution: str) -> str | None:
    """Version of an installed package; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return getattr(hf_spec, "__version__", None) if distribution == "hf_spec" else None


def _git_revision() -> str | None:
    """Commit of the checkout that hf_spec runs from, with ``-dirty`` if it has changes.

    None outside a checkout. An installed copy may lie inside another repository, such as in the
    virtual environment of a project, so the package's own file must be tracked.
    """
    source = Path(hf_spec.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(source), *arguments], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
