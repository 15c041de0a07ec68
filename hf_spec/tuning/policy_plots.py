"""Draws the policy's decisions from the ``results.json`` of a benchmark.

The plots show the last call of each run: the trees it chose, the step times that the choices rest
on, and predicted beside emitted tokens.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from hf_spec.bench.figures import new_figure, plot_points, save_figure
from hf_spec.bench.results import ALL
from hf_spec.hub.card import RESULTS
from hf_spec.hub.folder import read_json

POLICY_PLOT = "policy.png"
PROMISED, MEASURED = "tab:red", "tab:blue"
#: Number of decisions in a running mean.
WINDOW = 16


def read_policies(folder: Path) -> list[dict[str, Any]]:
    """The entries over all tasks in a folder's ``results.json`` that contain decisions.

    Raises:
        ValueError: it is no result of ``hf-spec bench``, or no entry contains decisions.
    """
    path = folder / RESULTS
    runs = read_json(path).get("runs")
    if not isinstance(runs, list):
        raise ValueError(f"{str(path)!r} is no result of hf-spec bench: it has no runs")
    chosen = [one for one in runs if one["task"] == ALL and _policy(one)]
    if not chosen:
        raise ValueError(f"{str(path)!r} has no run with a policy: all strategies are stock ones")
    return chosen


def plot_policies(folder: Path, target: Path) -> list[Path]:
    """Draw the policy's decisions in a folder's ``results.json`` as ``policy.png`` in ``target``,
    with three panels for each run, and one panel for all runs."""
    return [save_figure(draw_policies(read_policies(folder)), target / POLICY_PLOT)]


def draw_policies(runs: list[dict[str, Any]]) -> Any:
    """The figure that :func:`plot_policies` writes.

    Args:
        runs: entries from :func:`read_policies`.
    """
    count = len(runs) + 1
    figure = new_figure(13, 3.6 * count)
    parts = figure.subfigures(count, 1, squeeze=False)[:, 0]
    for run, part in zip(runs, parts):
        part.suptitle(_title(run), fontsize=10)
        left, middle, right = part.subplots(1, 3)
        _sizes(left, _policy(run))
        _times(middle, _policy(run))
        _promises(right, _policy(run))
    _speedups(parts[-1].subplots(1, 1), runs)
    return figure


def promised_speedup(policy: dict[str, Any]) -> float | None:
    """The speedup over plain decoding that the choices of the last call promised; None if unknown.

    The plain step time is that of the last batch size, so steps of larger batches do not count.

    Args:
        policy: ``stats.details["policy"]`` of a run.
    """
    known = [
        one for one in policy["history"]
        if one["promised_tokens"] and 0 < one["batch_size"] <= policy["batch_size"]
    ]  # fmt: skip
    if not known or not policy["plain_seconds"]:
        return None
    tokens = sum(one["promised_tokens"] / one["batch_size"] for one in known)
    seconds = sum(one["promised_seconds"] for one in known)
    return float(policy["plain_seconds"] * tokens / seconds)


def _policy(run: dict[str, Any]) -> dict[str, Any]:
    """The policy's report in a run's statistics; empty if there is none."""
    found: dict[str, Any] = (run.get("stats", {}).get("details") or {}).get("policy") or {}
    return found


def _title(run: dict[str, Any]) -> str:
    policy = _policy(run)
    parts = [f"{run['strategy']}, batch {run['batch_size']}"]
    if policy["came_per_promised"] is not None:
        parts.append(f"{policy['came_per_promised']:.2f} tokens emitted per predicted one")
    if policy["median_time_error"] is not None:
        parts.append(f"median error of step times {policy['median_time_error']:.0%}")
    if policy["paused"]:
        parts.append("paused at the end")
    return "; ".join(parts)


def _sizes(axes: Any, policy: dict[str, Any]) -> None:
    """Draw the number of steps with each number of candidates."""
    taken: Counter[int] = Counter()
    for one in policy["steps"]:
        taken[one["candidates"]] += one["count"]
    sizes = sorted(taken)
    axes.bar(range(len(sizes)), [taken[size] for size in sizes], color=MEASURED)
    axes.set_xticks(range(len(sizes)), [str(size) if size else "plain" for size in sizes])
    axes.set(xlabel="candidates", ylabel="steps", title="trees chosen")


def _times(axes: Any, policy: dict[str, Any]) -> None:
    """Draw the fitted step time T(n) and the measured means."""
    points = sorted((int(tokens), 1000 * spent) for tokens, spent in policy["seconds"].items())
    wide = [one for one in points if one[0] > 1]
    plot_points(axes, wide, "o", color=MEASURED, label="measured")
    if policy["plain_seconds"] is not None:
        plain = [(1, 1000 * policy["plain_seconds"])]
        plot_points(axes, plain, "s", color="black", label="plain step")
    if policy["b0"] is not None:
        ends = (1, max((tokens for tokens, _ in points), default=2))
        line = [(n, 1000 * (policy["b0"] + policy["b1"] * n)) for n in ends]
        plot_points(axes, line, color=PROMISED, label="b0 + b1 n")
    axes.set(xlabel="step tokens n of a row", ylabel="ms, without drafting", title="step time T(n)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _promises(axes: Any, policy: dict[str, Any]) -> None:
    """Draw predicted and emitted tokens per step and sequence, above the chosen sizes."""
    history = [one for one in policy["history"] if one["batch_size"]]
    # Steps without a prediction have nothing to compare with.
    known = [(at, one) for at, one in enumerate(history) if one["promised_tokens"]]
    for name, color, label in (
        ("promised_tokens", PROMISED, "predicted"), ("tokens", MEASURED, "emitted"),
    ):  # fmt: skip
        values = [one[name] / one["batch_size"] for _, one in known]
        line = list(zip((at for at, _ in known), running_mean(values)))
        plot_points(axes, line, color=color, label=f"{label}, mean of {WINDOW}")
    axes.set(xlabel="decision", ylabel="tokens per step and row", title="predicted and emitted")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="lower left", framealpha=0.5)
    chosen = axes.twinx()
    sizes = [(at, one["candidates"]) for at, one in enumerate(history)]
    plot_points(chosen, sizes, ".", color="0.75", markersize=3, label="chosen")
    chosen.set_ylabel("candidates chosen (dots)", color="0.5")
    chosen.set_ylim(bottom=-0.5)
    axes.set_zorder(chosen.get_zorder() + 1)  # lines in front of dots
    axes.patch.set_visible(False)


def running_mean(values: list[float]) -> list[float]:
    """For each value, the mean of the last `WINDOW` values up to it, or of fewer at the start."""
    return [float(np.mean(values[max(at + 1 - WINDOW, 0) : at + 1])) for at in range(len(values))]


def _speedups(axes: Any, runs: list[dict[str, Any]]) -> None:
    """Draw the speedup that the last call's choices predicted beside the measured one."""
    places = np.arange(len(runs))
    promised = [promised_speedup(_policy(run)) or 0.0 for run in runs]
    axes.bar(places - 0.13, promised, 0.26, color=PROMISED, label="predicted, last call")
    measured = [run["speedup"] for run in runs]
    axes.bar(places + 0.13, measured, 0.26, color=MEASURED, label="measured, all calls")
    axes.set_xticks(places, [f"{run['strategy']}, batch {run['batch_size']}" for run in runs])
    axes.axhline(1.0, color="0.4", linestyle=":")
    axes.set(ylabel="speedup", title="speedup")
    axes.set_xlim(-0.6, max(len(runs), 4) - 0.4)
    axes.legend(fontsize=8)
