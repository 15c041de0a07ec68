"""What is shared by all that draws; matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_spec.files import replacing


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, which belongs to nobody else: nothing has to be closed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plot_points(axes: Any, points: Sequence[tuple[float, float]], *style: Any, **look: Any) -> None:
    """Draw pairs of x and y; without any, the legend names them all the same."""
    x, y = zip(*points) if points else ((), ())
    axes.plot(x, y, *style, **look)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a PNG in one step, without frames around what is drawn."""
    for axes in figure.get_axes():
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight")
    return path
