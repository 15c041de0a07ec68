"""Drawn texts and trees: what stands where, in which color."""

import sys
from pathlib import Path

import pytest
from drawn import lines
from matplotlib.colors import to_rgba
from tiny_checkpoint import make_tokenizer

from hf_spec.core.token_tree import TokenTree
from hf_spec.tools.demo.steps import VerifiedTree

sys.path.append(str(Path(__file__).parents[2] / "docs" / "scripts"))
from step_plots import ACCEPTED, OWN, REJECTED, ROOT, STEP_COLORS, plot_texts, plot_tree  # noqa: E402

TOKENIZER = make_tokenizer(chat=False)  # a token per byte


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def written(axes) -> list[tuple[float, str]]:
    """Lines of text with the column where they begin, from the top; blanks are not drawn."""
    found: dict[tuple[float, bool], list] = {}
    for text in axes.texts:
        x, y = text.get_position()
        found.setdefault((y, text.get_weight() == "bold"), []).append((x, text.get_text()))
    return [(min(line)[0], "".join(text for _, text in sorted(line))) for line in found.values()]


def test_the_background_changes_with_each_step() -> None:
    runs = {"plain": [ids(c) for c in "ab\nc"], "medusa": [ids("ab\n"), ids("c")]}
    (axes,) = plot_texts(TOKENIZER, runs, width=20).get_axes()
    # Both texts stand beside each other.
    assert [line for _, line in written(axes)] == [
        "plain: 4 tokens in 4 stepsmedusa: 4 tokens in 2 steps", "ab↵ab↵", "cc",
    ]  # fmt: skip
    boxes = [(box.get_x(), box.get_y(), box.get_width()) for box in axes.patches]
    # The second text stands beside the first, 20 characters and a gap to the right.
    assert boxes == [(0, 1, 1), (1, 1, 1), (2, 1, 1), (0, 2, 1), (23, 1, 3), (23, 2, 1)]
    colors = [box.get_facecolor() for box in axes.patches]
    first, second = map(to_rgba, STEP_COLORS)
    assert colors == [first, second, first, second, first, second]
    # Every character stands in the middle of its cell.
    places = [text.get_position() for text in axes.texts if "steps" not in text.get_text()]
    assert places == [(x + i + 0.5, y + 0.5) for x, y, width in boxes for i in range(width)]


def test_long_lines_are_wrapped_and_texts_stand_below_each_other() -> None:
    runs = {"one": [ids("abcdef")], "two": [ids("$x$ _y")]}
    (axes,) = plot_texts(TOKENIZER, runs, width=4, columns=1).get_axes()
    assert written(axes) == [
        (0, "one: 6 tokens in 1 steps"), (0.5, "abcd"), (0.5, "ef"),
        (0, "two: 6 tokens in 1 steps"), (0.5, "$x$"), (0.5, "_y"),
    ]  # fmt: skip
    assert [(box.get_x(), box.get_y()) for box in axes.patches] == [(0, 1), (0, 2), (0, 5), (0, 6)]


@pytest.mark.parametrize("wrong", [{"runs": {}}, {"width": 0}, {"columns": 0}])
def test_nothing_to_draw_is_an_error(wrong: dict) -> None:
    with pytest.raises(ValueError, match="give at least one each"):
        plot_texts(TOKENIZER, **{"runs": {"plain": [ids("a")]}, **wrong})


def step(**changes: object) -> VerifiedTree:
    """Root a with children b and c, below b a space and a line break; b and the space accepted."""
    fields = {
        "tree": TokenTree((-1, 0, 0, 1, 1)), "tokens": ids("abc \n"),
        "probabilities": [1.0, 0.5, 0.25, 0.125, 0.1], "accepted": [0, 1, 3], "emitted": ids("b z"),
    }  # fmt: skip
    return VerifiedTree(**{**fields, **changes})


def boxes(axes) -> dict[str, tuple]:
    """Color of each node's box by its label."""
    return {text.get_text(): text.get_bbox_patch().get_facecolor() for text in axes.texts}


def test_nodes_have_token_probability_and_color() -> None:
    (axes,) = plot_tree(TOKENIZER, step()).get_axes()
    assert axes.get_title() == "4 draft tokens, 3 tokens emitted"
    assert boxes(axes) == {
        "a": to_rgba(ROOT), "b\n0.50": to_rgba(ACCEPTED), "c\n0.25": to_rgba(REJECTED),
        "·\n0.12": to_rgba(ACCEPTED), "↵\n0.10": to_rgba(REJECTED), "z": to_rgba(OWN),
    }  # fmt: skip
    # From left to right by depth, the model's own token behind the last accepted one.
    assert [text.get_position()[0] for text in axes.texts] == [0, 1, 1, 2, 2, 3]
    assert len({text.get_position() for text in axes.texts}) == 6
    places = {text.get_text(): text.get_position() for text in axes.texts}
    ends = [tuple(points) for points in lines(axes).values()]
    assert ends[-1] == (places["·\n0.12"], places["z"])
    thick = [line.get_linewidth() > 2 for line in axes.get_lines()]
    assert thick == [True, False, True, False, False]


def test_without_probabilities_and_with_nothing_accepted() -> None:
    (axes,) = plot_tree(
        TOKENIZER, step(probabilities=None, accepted=[0], emitted=ids("z"))
    ).get_axes()
    assert axes.get_title() == "4 draft tokens, 1 token emitted"
    found = boxes(axes)
    assert list(found) == ["a", "b", "c", "·", "↵", "z"]
    assert to_rgba(ACCEPTED) not in found.values()
    # The own token is a sibling of b and c here, and hides neither.
    heights = [text.get_position()[1] for text in axes.texts if text.get_position()[0] == 1]
    assert len(heights) == 3 and min(abs(a - b) for a in heights for b in heights if a != b) >= 1
