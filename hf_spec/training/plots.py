"""Draws a training from its history; matplotlib is imported when drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_spec.bench.figures import new_figure, plot_points, save_figure

LOSS_PLOT, TAU_PLOT = "loss.png", "tau.png"


def plot_history(history: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write ``loss.png`` and ``tau.png`` to a folder; see :func:`draw_history`."""
    for name, figure in draw_history(history).items():
        save_figure(figure, folder / name)


def draw_history(history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of loss and tau over the steps, by file name.

    Args:
        history: the log of Transformers' Trainer.
    """
    figures = {}
    for name, label, series in (
        (LOSS_PLOT, "loss (nats)", {"loss": "training", "eval_loss": "held-out answers"}),
        (TAU_PLOT, "tau (tokens per forward pass)", {"eval_tau": "held-out prompts, decoded"}),
    ):
        figure = new_figure(6, 4)
        axes = figure.subplots()
        for key, title in series.items():
            points = [(row["step"], row[key]) for row in history if key in row]
            style = "o-" if key.startswith("eval") else "-"
            plot_points(axes, points, style, label=title)
        axes.set(xlabel="step", ylabel=label)
        if name == TAU_PLOT:  # noise of a hundredth is not to look like progress
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 1.0), max(high, 2.0))
        axes.legend()
        axes.grid(alpha=0.3)
        figures[name] = figure
    return figures
