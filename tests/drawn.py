"""What a matplotlib figure holds, as plain data: tests look at artists, never at pixels."""

from typing import Any


def lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The points of each line, by label."""
    return {
        line.get_label(): [(float(x), float(y)) for x, y in line.get_xydata()]
        for line in axes.get_lines()
    }


def bars(axes: Any) -> list[float]:
    """Heights of the bars, from left to right as drawn."""
    return [float(bar.get_height()) for bar in axes.patches]


def texts(axes: Any) -> list[str]:
    """Texts within the axes, without title and labels."""
    return [text.get_text() for text in axes.texts]


def labels(axes: Any) -> tuple[str, str, str]:
    """Title and the labels of both axes."""
    return axes.get_title(), axes.get_xlabel(), axes.get_ylabel()
