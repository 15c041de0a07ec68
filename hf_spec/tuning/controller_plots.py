"""Draws what decoding decided for itself, from the ``results.json`` of a benchmark.

Online trees: their size, the step times behind it, and expected beside measured speed. All
strategies: what the controller expected of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hf_spec.bench.figures import new_figure, plot_points, save_figure
from hf_spec.bench.report import ALL
from hf_spec.hub.card import RESULTS
from hf_spec.hub.folder import read_json

ESTIMATE, MEASURED = "tab:red", "tab:blue"


def read_decisions(path: Path) -> list[dict[str, Any]]:
    """The runs over all tasks whose statistics tell what the controller decided.

    Args:
        path: a ``results.json``, or the folder it is in.

    Raises:
        ValueError: there is none, it is none, or no run has decisions.
    """
    path = path / RESULTS if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there is no {str(path)!r}: run hf-spec bench --output DIR")
    runs = read_json(path).get("runs")
    if not isinstance(runs, list):
        raise ValueError(f"{str(path)!r} is no result of hf-spec bench: it has no runs")
    chosen = [one for one in runs if one["task"] == ALL and _details(one)]
    if not chosen:
        raise ValueError(
            f"{str(path)!r} has no run with decisions: none has online trees, and the controller "
            "was off (fallback=False) or the strategies are stock ones"
        )
    return chosen


def _details(run: dict[str, Any]) -> dict[str, Any]:
    """What the drafter and the controller of a run have reported; empty if nothing."""
    details = run.get("stats", {}).get("details") or {}
    return {name: details[name] for name in ("online", "controller") if details.get(name)}


def plot_decisions(runs: list[dict[str, Any]], path: Path) -> Path:
    """Write a PNG: a row of three panels for each run with online trees, and one for all runs.

    Args:
        runs: from :func:`read_decisions`.
        path: of the image.
    """
    online = [run for run in runs if "online" in _details(run)]
    paused = [run for run in runs if "controller" in _details(run)]
    count = len(online) + bool(paused)
    figure = new_figure(13, 3.6 * count)
    parts = figure.subfigures(count, 1, squeeze=False)[:, 0]
    for run, part in zip(online, parts):
        part.suptitle(_title(run), fontsize=10)
        left, middle, right = part.subplots(1, 3)
        details = _details(run)["online"]
        _sizes(left, details)
        _times(middle, details)
        _speeds(right, details)
    if paused:
        _controller(parts[-1].subplots(1, 1), paused)
    return save_figure(figure, path)


def _title(run: dict[str, Any]) -> str:
    details = _details(run)["online"]
    error = details["median_error"]
    said = "" if error is None else f"; step times foreseen with a median error of {error:.0%}"
    return (
        f"{run['strategy']}, batch {details['batch_size']}, up to {details['length']} tokens: "
        f"{details['candidates']} candidates, {details['rows']} rows{said}"
    )


def _sizes(axes: Any, details: dict[str, Any]) -> None:
    history = details["history"]
    steps, rows = [one["step"] for one in history], [one["rows"] for one in history]
    axes.step(steps, rows, "o-", where="post", markersize=3)
    axes.set(xlabel="step", ylabel="rows of a step", title="tree chosen")
    axes.set_ylim(bottom=0)


def _times(axes: Any, details: dict[str, Any]) -> None:
    """T(i), and the measured mean of each size."""
    points = sorted((int(rows), 1000 * spent) for rows, spent in details["seconds"].items())
    plot_points(axes, points, "o", color=MEASURED, label="measured")
    if details["b0"] is not None:
        ends = (0, max((rows for rows, _ in points), default=1))
        line = [(rows, 1000 * (details["b0"] + details["b1"] * rows)) for rows in ends]
        plot_points(axes, line, color=ESTIMATE, label="estimated, recent sizes first")
    axes.axvline(details["rows"], color="0.6", linestyle=":", label="chosen")
    axes.set(xlabel="rows of a step", ylabel="ms, without drafting", title="step time T(i)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _speeds(axes: Any, details: dict[str, Any]) -> None:
    history = details["history"]
    for name, color in (("predicted", ESTIMATE), ("measured", MEASURED)):
        known = [(one["step"], one[name]) for one in history if one[name] is not None]
        plot_points(axes, known, "o-", color=color, markersize=3, label=name)
    axes.set(xlabel="step", ylabel="tokens per second and row", title="speed of the tree chosen")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _controller(axes: Any, runs: list[dict[str, Any]]) -> None:
    """What was expected of drafting at every step, beside the speedup that was measured."""
    places = np.arange(len(runs))
    expected = [_details(run)["controller"]["predicted_speedup"] or 0.0 for run in runs]
    measured = [run["speedup"] for run in runs]
    axes.bar(places - 0.13, expected, 0.26, color=ESTIMATE, label="drafting always")
    axes.bar(places + 0.13, measured, 0.26, color=MEASURED, label="measured, pauses included")
    names = [
        f"{run['strategy']}, batch {run['batch_size']}"
        + ("\npaused at the end" if _details(run)["controller"]["falls_back"] else "")
        for run in runs
    ]
    axes.set_xticks(places, names)
    axes.axhline(1.0, color="0.4", linestyle=":")
    axes.set(ylabel="speedup", title="controller")
    axes.set_xlim(-0.6, max(len(runs), 4) - 0.4)
    axes.legend(fontsize=8)
