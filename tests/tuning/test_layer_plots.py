"""The plots of a search for layers to skip, from a small one whose every figure is known."""

from __future__ import annotations

from typing import Any

import pytest
from drawn import dots, labels, legend, lines, ticks
from matplotlib.colors import to_rgba

from hf_spec.tuning.layers.plots import ATTENTION, KEPT, MLP, draw_layers, draw_search


def trial(number: int, value: float, skipped: int, state: str = "complete") -> dict[str, Any]:
    return {
        "number": number, "state": state, "value": value, "speedup": 1 / value, "skipped": skipped,
    }  # fmt: skip


@pytest.fixture
def search() -> dict[str, Any]:
    trials = [
        trial(0, 0.8, 2), trial(1, 2.0, 5, "pruned"), trial(2, 1.0, 3), trial(3, 0.5, 3),
        trial(4, 0.625, 2),
    ]  # fmt: skip
    best = {**trials[3], "skip_attention": [1], "skip_mlp": [1, 2]}
    baselines = [
        {"name": "searched", "speedup": 2.0}, {"name": "first", "speedup": 0.75},
        {"name": "random", "speedup": 1.1},
    ]  # fmt: skip
    return {
        "trials": trials, "best": best, "layers": 4, "baselines": baselines,
        "settings": {"objective": "modelled"},
    }  # fmt: skip


def test_values_by_trial(search: dict[str, Any]) -> None:
    left, _ = draw_search(search).get_axes()
    assert labels(left) == ("search", "trial", "time per token / plain (modelled)")
    assert dots(left) == {
        "complete": [(0, 0.8), (2, 1.0), (3, 0.5), (4, 0.625)], "pruned": [(1, 2.0)],
    }  # fmt: skip
    assert lines(left)["best"] == [(0, 0.8), (2, 0.8), (3, 0.5), (4, 0.5)]
    assert legend(left) == ["complete", "pruned", "best", "plain decoding"]


def test_speedups_by_skipped_sublayers(search: dict[str, Any]) -> None:
    _, right = draw_search(search).get_axes()
    assert labels(right) == ("of 8 sublayers", "skipped sublayers", "speedup (modelled)")
    (points,) = dots(right).values()
    assert points == [(2, 1.25), (3, 1.0), (3, 2.0), (2, 1.6)]
    envelope, *named = right.get_lines()
    assert envelope.get_xydata().tolist() == [[2, 1.6], [3, 2.0]]
    drawn = lines(right)
    # The searched choice is the star; each simple choice skips as many sublayers.
    assert drawn["best"] == [(3, 2.0)] and drawn["first"] == [(3, 0.75)]
    assert drawn["random"] == [(3, 1.1)] and legend(right) == ["best", "first", "random"]


def test_held_out_values_are_named(search: dict[str, Any]) -> None:
    """They stand beside the choice's own value on the same prompts, not on those of the search."""
    search["held_out"] = [{"prompts": 2}]
    search["baselines"][0]["speedup"] = 1.5
    _, right = draw_search(search).get_axes()
    assert lines(right)["best"] == [(3, 2.0)]
    assert lines(right)["searched, held out"] == [(3, 1.5)]
    names = [f"{name}, held out" for name in ("searched", "first", "random")]
    assert legend(right) == ["best", *names]


def test_a_square_for_each_sublayer(search: dict[str, Any]) -> None:
    (axes,) = draw_layers(search).get_axes()
    assert axes.get_title() == "drafting skips 1 attention and 2 MLP sublayers"
    assert ticks(axes) == ["0", "1", "2", "3"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["MLP", "attention"]
    colours = {
        (int(square.get_x()), int(square.get_y())): square.get_facecolor()
        for square in axes.patches
    }
    skipped = {(1, 0): MLP, (2, 0): MLP, (1, 1): ATTENTION}
    assert colours == {
        (layer, line): to_rgba(skipped.get((layer, line), KEPT))
        for layer in range(4)
        for line in range(2)
    }


def test_without_baselines(search: dict[str, Any]) -> None:
    _, right = draw_search({**search, "baselines": None}).get_axes()
    assert legend(right) == ["best"]
