"""Draws texts by their steps, and the tree of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hf_spec.core.shapes import TokenTree
from hf_spec.tools.demo import VerifiedTree, pieces

#: Backgrounds of neighboring steps.
STEP_COLORS = ("#a9dce3", "#fbe29a")
ROOT, ACCEPTED, REJECTED, OWN = "#8fb7e8", "#a8dba0", "#ececec", "#ffffff"
#: Size in points of a text's characters; width and height of a cell relative to it.
POINTS, CELL_WIDTH, CELL_HEIGHT = 8, 0.602, 1.4
#: Characters between two texts beside each other, and lines between two below each other.
GAP = 3, 1


def plot_texts(
    tokenizer: Any, runs: Mapping[str, Sequence[Sequence[int]]], width: int = 60, columns: int = 2
) -> Any:
    """Draw texts whose background changes from step to step.

    Args:
        tokenizer: decodes the tokens.
        runs: the tokens of each step, by the name that stands above the text, such as
            ``{"medusa": streamer.steps}``; see :class:`StepStreamer`.
        width: characters per line, from 1; longer lines are wrapped.
        columns: texts beside each other, from 1.

    Returns:
        A matplotlib ``Figure``. ``figure.savefig(path)`` writes it; a notebook shows it.

    Raises:
        ValueError: there is no text, or ``width`` or ``columns`` is less than 1.
    """
    if not runs or width < 1 or columns < 1:
        raise ValueError(
            f"{len(runs)} texts in {columns} columns of {width} characters: give at least one each."
        )
    placed = {name: list(_cells(pieces(tokenizer, steps), width)) for name, steps in runs.items()}
    lines = 2 + max((line for cells in placed.values() for _, line, *_ in cells), default=0)
    columns = min(columns, len(runs))
    across = columns * (width + GAP[0]) - GAP[0]
    down = -(-len(runs) // columns) * (lines + GAP[1]) - GAP[1]

    unit = POINTS / 72  # inches
    figure = Figure(figsize=(across * CELL_WIDTH * unit, down * CELL_HEIGHT * unit))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, across), ylim=(down, 0))
    axes.axis("off")
    look = {"fontsize": POINTS, "va": "center", "family": "monospace", "parse_math": False}
    for order, (name, steps) in enumerate(runs.items()):
        left = (order % columns) * (width + GAP[0])
        top = (order // columns) * (lines + GAP[1])
        title = f"{name}: {sum(map(len, steps))} tokens in {len(steps)} steps"
        axes.text(left, top + 0.5, title, weight="bold", **look)
        for step, line, column, text in placed[name]:
            place = left + column, top + 1 + line
            color = STEP_COLORS[step % len(STEP_COLORS)]
            axes.add_patch(_rectangle(place, len(text), color))
            for offset, character in enumerate(text):  # widths of whole words would be rounded
                if character != " ":
                    middle = place[0] + offset + 0.5, place[1] + 0.5
                    axes.text(*middle, character, ha="center", **look)
    return figure


def _rectangle(place: tuple[float, float], width: int, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(place, width, 1, facecolor=color, edgecolor="none")


def _cells(texts: Sequence[str], width: int) -> Iterator[tuple[int, int, int, str]]:
    """Where texts stand: number of the text, line, first column, and what stands there.

    A line break is shown as a sign at the end of its line.
    """
    line = column = 0
    for number, text in enumerate(texts):
        for part in text.expandtabs(4).splitlines(keepends=True):
            ends = part.endswith("\n")
            part = part.rstrip("\r\n") + "\u21b5" * ends
            while part:
                if column == width:
                    line, column = line + 1, 0
                fits, part = part[: width - column], part[width - column :]
                yield number, line, column, fits
                column += len(fits)
            if ends:
                line, column = line + 1, 0


def plot_tree(tokenizer: Any, step: VerifiedTree) -> Any:
    """Draw the tree of a step from left to right, a box for each node.

    A box shows the token and, if it is known, the estimated probability that it and all nodes
    before it are accepted. Accepted draft tokens are green, the root is blue. The dashed box is the
    bonus token.

    Args:
        tokenizer: decodes the tokens.
        step: one of :attr:`StepStreamer.trees`.

    Returns:
        A matplotlib ``Figure``. ``figure.savefig(path)`` writes it; a notebook shows it.
    """
    tree, accepted = step.tree, set(step.accepted)
    depths, heights = list(tree.depths), _heights(tree)
    labels = [_label(tokenizer, token) for token in step.tokens]
    if step.probabilities is not None:
        labels[1:] = [f"{label}\n{p:.2f}" for label, p in zip(labels[1:], step.probabilities[1:])]
    colors = [ACCEPTED if node in accepted else REJECTED for node in range(len(tree))]
    colors[0] = ROOT
    edges = [(tree.parents[node], node) for node in range(1, len(tree))]

    last = step.accepted[-1]
    own = len(tree)
    depths.append(depths[last] + 1)
    # Below everything else of its depth, so that no box is hidden.
    beside = [height for height, depth in zip(heights, depths) if depth == depths[own]]
    heights.append(min([heights[last] + 1, *beside]) - 1)
    labels.append(_label(tokenizer, step.emitted[-1]))
    colors.append(OWN)
    edges.append((last, own))

    levels, span = max(depths) + 1, max(heights) - min(heights) + 1
    figure = Figure(figsize=(1.25 * levels, 0.42 * span + 0.4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(-0.5, levels - 0.5), ylim=(min(heights) - 0.6, max(heights) + 0.6))
    axes.axis("off")
    count = len(step.emitted)
    axes.set_title(
        f"{tree.num_draft_tokens} draft tokens, {count} token{'s' * (count != 1)} emitted",
        fontsize=10,
    )
    for parent, node in edges:
        taken = node in accepted
        axes.plot(
            [depths[parent], depths[node]], [heights[parent], heights[node]], zorder=1,
            color="#4c9a41" if taken else "0.75", linewidth=2.5 if taken else 1,
            linestyle="--" if node == own else "-",
        )  # fmt: skip
    for node, label in enumerate(labels):
        style = "--" if node == own else "-"
        axes.text(
            depths[node], heights[node], label, parse_math=False, ha="center", va="center",
            family="monospace", fontsize=8, zorder=2,
            bbox={
                "boxstyle": "round,pad=0.35", "facecolor": colors[node],
                "edgecolor": "0.35", "linestyle": style,
            },
        )  # fmt: skip
    return figure


def _heights(tree: TokenTree) -> list[float]:
    """Where nodes stand: leaves at 0, -1, ... by rank, parents in the middle of their children."""
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node in sorted(range(1, len(tree)), key=lambda node: tree.ranks[node]):
        children[tree.parents[node]].append(node)
    heights, leaves = [0.0] * len(tree), itertools.count()

    def place(node: int) -> float:
        below = [place(child) for child in children[node]]
        heights[node] = sum(below) / len(below) if below else -float(next(leaves))
        return heights[node]

    place(0)
    return heights


def _label(tokenizer: Any, token: int) -> str:
    """A token as it is shown: spaces as dots, line breaks as arrows."""
    text = tokenizer.decode([token]).replace("\t", "\u2192").replace("\n", "\u21b5")
    text = text.replace(" ", "\u00b7") or "(empty)"
    return text if len(text) <= 14 else f"{text[:6]}\u2026{text[-6:]}"


def positions(tree: TokenTree) -> Any:
    """``(nodes,)`` horizontal positions: leaves at 0, 1, ..., parents above their children."""
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(1, len(tree)):
        children[tree.parents[node]].append(node)
    for below in children:
        below.sort(key=lambda node: tree.ranks[node])
    place, leaves = np.zeros(len(tree)), 0

    def visit(node: int) -> None:
        nonlocal leaves
        for child in children[node]:
            visit(child)
        if children[node]:
            place[node] = place[children[node]].mean()
        else:
            place[node] = leaves
            leaves += 1

    visit(0)
    return place
