"""Helpers of all plots; matplotlib, of the extra ``plots``, is imported when drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_spec.files import replacing


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, independent of pyplot, so that it need not be closed.

    Args:
        width, height: in inches.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, atomically, without the top and right spines of its axes."""
    for axes in figure.get_axes():
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight")
    return path
