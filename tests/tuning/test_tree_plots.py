"""The plots of tuned trees, from an entry whose every figure is known."""

from __future__ import annotations

from typing import Any

import pytest
from drawn import labels, legend, lines, texts

from hf_spec.core.token_tree import TokenTree
from hf_spec.tuning.trees.plots import draw_trees, draw_tuning, positions

#: State 1 has two candidates, state 2 a third below the first; probes under some nodes.
STATES = [
    {"paths": [], "probes": [2]},
    {"paths": [[0], [1]], "probes": [2, 1, 0]},
    {"paths": [[0], [1], [0, 0]], "probes": [1, 1, 0, 2]},
]


@pytest.fixture
def entry() -> dict[str, Any]:
    setting = {
        "batch_size": 2, "context": 100, "plain_seconds": 0.01, "size": 4, "tau": 1.7,
        "speedup": 1.5, "seconds": {"8": 0.02, "4": 0.012}, "speedups": [1.1, 1.5],
        "visits": [0.25, 0.75, 0.0], "states": STATES,
    }  # fmt: skip
    sizes = [
        {"size": 2, "tau": 1.2, "static_tau": 1.1, "random_tau": 1.0},
        {"size": 4, "tau": 1.7, "static_tau": 1.4, "random_tau": 1.3},
    ]
    return {
        "device": "Some CPU", "dtype": "float32", "landed_accuracies": [[0.5, 0.25], [0.4, 0.04]],
        "settings": [setting, {**setting, "context": 900, "visits": [0.0, 0.0, 1.0]}],
        "sizes": sizes,
    }  # fmt: skip


def test_parents_stand_above_the_middle_of_their_children() -> None:
    tree = TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [0, 2]])
    assert positions(tree).tolist() == [2.0, 1.0, 3.0, 0.0, 1.0, 2.0]


def test_the_tree_of_each_state_that_occurs(entry: dict[str, Any]) -> None:
    figure = draw_trees(entry, entry["settings"][0])
    (axes,) = figure.get_axes()  # state 0 has no candidates, state 2 does not occur
    assert axes.get_title() == "1 token predicted: 2 candidates, 3 probes; 75% of steps"
    assert "Some CPU, float32, batch 2, context 100: 4 step tokens, tau 1.70" in (
        figure.get_suptitle()
    )
    # Probabilities of the nodes in per cent, probes below those that have some.
    assert texts(axes) == ["100", "+2", "50", "+1", "25"]
    assert [text.xy for text in axes.texts if not text.get_text().startswith("+")] == [
        (0.5, 0), (0.0, -1), (1.0, -1),
    ]  # fmt: skip


def test_the_tree_of_another_setting(entry: dict[str, Any]) -> None:
    (axes,) = draw_trees(entry, entry["settings"][1]).get_axes()
    assert axes.get_title() == "2 tokens predicted: 3 candidates, 4 probes; 100% of steps"
    assert texts(axes) == ["100", "+1", "50", "+1", "25", "20", "+2"]  # 0.5 * 0.4
    # A line from each parent to its child, wider where it is likelier.
    found = [line.get_xydata().tolist() for line in axes.get_lines()]
    assert found == [
        [[0.5, 0], [0.0, -1]], [[0.5, 0], [1.0, -1]], [[0.0, -1], [0.0, -2]],
    ]  # fmt: skip
    widths = [line.get_linewidth() for line in axes.get_lines()]
    assert widths == pytest.approx([0.5 + 3 * p for p in (0.5, 0.25, 0.2)])


def test_tau_and_times_by_step_tokens(entry: dict[str, Any]) -> None:
    left, middle, right = draw_tuning({"devices": [entry]}).get_axes()
    assert labels(left) == ("acceptance", "step tokens", "tau (tokens per forward pass)")
    assert lines(left) == {
        "tuned": [(2, 1.2), (4, 1.7)], "static": [(2, 1.1), (4, 1.4)],
        "random": [(2, 1.0), (4, 1.3)],
    }  # fmt: skip
    assert legend(left) == ["tuned", "static", "random"]

    names = [f"Some CPU, batch 2, context {context}" for context in (100, 900)]
    assert labels(middle) == ("step time", "step tokens", "time / plain step")
    assert legend(middle) == names
    assert lines(middle)[names[0]] == [(4, pytest.approx(1.2)), (8, pytest.approx(2.0))]

    assert labels(right)[1:] == ("step tokens", "predicted speedup")
    assert lines(right)[names[0]] == [(2, 1.1), (4, 1.5)]
    stars = [line for line in right.get_lines() if line.get_marker() == "*"]
    assert [star.get_xydata().tolist() for star in stars] == [[[4, 1.5]]] * 2
