"""Charts of what tables of the documentation say, for :mod:`figures`; each holds its numbers as its
description, so that a test can tell whether they are those of the page."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

INSIDE = Path(__file__).parent.parent / "inside"
#: A color for each line, which differ for the color-blind, too (Okabe and Ito, "Color Universal
#: Design", 2008).
COLORS = {
    "medusa": "#0072b2", "space": "#d55e00", "prompt_lookup": "#009e73", "bita": "#cc79a7",
    "Transformers' own lookups": "#7f7f7f", "ppd": "#e69f00", "eagle3": "#56b4e9",
    "dspark": "#000000", "dflash": "#7f7f7f", "as it is": "#0072b2", "compiled": "#d55e00",
}  # fmt: skip
#: Strategies whose tau is shown by task and by context, by their names in tables.
SHOWN = {
    "medusa": "medusa", "space": "space", "prompt_lookup": "prompt_lookup",
    "Transformers' lookups": "Transformers' own lookups",
}  # fmt: skip

Series = dict[str, list[float]]


def read_table(text: str, above: str) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the first table below a line, without backticks.

    Raises:
        ValueError: there is none.
    """
    lines = iter(text.partition(above)[2].splitlines())
    table = [*takewhile(is_row, dropwhile(lambda line: not is_row(line), lines))]
    if not table:
        raise ValueError(f"there is no table below {above!r}")
    rows = ([cell.strip() for cell in row.replace("`", "").split("|")[1:-1]] for row in table)
    heads, _, *cells = rows
    return heads, cells


def is_row(line: str) -> bool:
    return line.startswith("|")


def draft_tokens(text: str) -> tuple[list[str], Series]:
    """Numbers of draft tokens, and tau of each method."""
    (_, *names), rows = read_table(text, "where every step drafts a tree of so many tokens")
    columns = zip(names, zip(*(row[1:] for row in rows)))
    return [row[0] for row in rows], {name: [*map(float, column)] for name, column in columns}


def tasks(text: str) -> tuple[list[str], Series]:
    """Tasks, those of the largest tau last, and tau of each strategy."""
    heads, rows = read_table(text, "## Spec-Bench, each task")
    rows = [row for row in rows if not row[0].startswith(("all", "95"))]
    found = {
        shown: [float(re.findall(r"\(([\d.]+)\)", row[heads.index(name)])[0]) for row in rows]
        for name, shown in SHOWN.items()
    }
    order = sorted(range(len(rows)), key=lambda place: found["medusa"][place])
    return [rows[i][0] for i in order], {
        name: [values[i] for i in order] for name, values in found.items()
    }


def contexts(text: str) -> tuple[list[str], Series]:
    """Tokens of a prompt, and tau of each strategy."""
    heads, rows = read_table(text, "### bfloat16, with AMX")
    short = {row[0]: float(row[heads.index("tau")]) for row in rows}
    (*_, medusa, lookups, stock), longer = read_table(text, "speed and tau behind long contexts")
    names = {"medusa": medusa, "prompt_lookup": lookups, "Transformers' prompt lookup": stock}
    found = {
        name: [short[name], *(float(row[3 + place].split(",")[-1]) for row in longer)]
        for place, name in enumerate(names)
    }
    found[SHOWN["Transformers' lookups"]] = found.pop("Transformers' prompt lookup")
    return ["Spec-Bench's own", *(f"{row[0]} tokens" for row in longer)], found


def step_times(text: str) -> tuple[list[str], Series]:
    """Tokens of a forward, and milliseconds by the way it runs, at batch 1 behind 300 tokens."""
    _, rows = read_table(text, "## Compiled steps, one by one")
    rows = [row for row in rows if row[0] == "1, 300"]
    found = {"as it is": 2, "compiled": 3}
    return [row[1] for row in rows], {
        name: [float(row[place]) for row in rows] for name, place in found.items()
    }


def lines(places: Sequence[str], series: Series, title: str, below: str) -> Any:
    """A line for each of the series, its name at its end."""
    figure, axes = plt.subplots(figsize=(7.2, 3.9))
    spread = (max(map(max, series.values())) - min(map(min, series.values()))) / 18
    end = float("inf")
    for name, values in sorted(series.items(), key=lambda one: -one[1][-1]):
        color = COLORS[name]
        axes.plot(range(len(places)), values, "o-", color=color, linewidth=1.8, markersize=5)
        end = min(values[-1], end - spread)  # names do not cover each other
        label = f"{name} {values[-1]:g}"
        axes.annotate(label, (len(places) - 0.9, end), color=color, va="center")
    axes.set(xticks=range(len(places)), xticklabels=places, xlabel=below)
    axes.set_xlim(-0.2, len(places) + 0.3)
    axes.set_ylim(bottom=float(title.startswith("tau")))  # what plain decoding has
    return finished(figure, axes, title)


def dots(places: Sequence[str], series: Series, title: str, below: str) -> Any:
    """A row of dots for each place."""
    figure, axes = plt.subplots(figsize=(7.2, 4.4))
    for name, values in series.items():
        axes.plot(values, range(len(places)), "o", color=COLORS[name], label=name, markersize=7)
    axes.set(yticks=range(len(places)), yticklabels=places, xlabel=below)
    axes.grid(axis="y", color="#dddddd")
    axes.legend(frameon=False, ncols=2, loc="lower right")
    return finished(figure, axes, title)


def bars(places: Sequence[str], series: Series, title: str, below: str) -> Any:
    """Bars side by side at each place."""
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    width = 0.8 / len(series)
    for order, (name, values) in enumerate(series.items()):
        at = [place + (order - (len(series) - 1) / 2) * width for place in range(len(places))]
        axes.bar_label(
            axes.bar(at, values, 0.94 * width, color=COLORS[name], label=name), fmt="%.2f"
        )
    axes.set(xticks=range(len(places)), xticklabels=places, xlabel=below)
    axes.set_ylim(0, 1.3 * max(map(max, series.values())))
    axes.legend(frameon=False, ncols=len(series), loc="upper left")
    return finished(figure, axes, title)


def finished(figure: Any, axes: Any, title: str) -> Any:
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


#: By name: the page, what reads it, what draws it, the title and the word below.
CHARTS: dict[str, tuple[Any, ...]] = {
    "tau_by_draft_tokens": (
        "appendix_small_model.md", draft_tokens, lines,
        "tau by draft tokens of a step: a 22M Llama, ten minutes of training each",
        "draft tokens",
    ),
    "tau_by_task": (
        "appendix_benchmarks.md", tasks, dots, "tau by task of Spec-Bench: a 22M Llama", "tau",
    ),
    "tau_by_context": (
        "benchmarks.md", contexts, bars,
        "tau by length of the prompt: SmolLM2-135M-Instruct, bf16",
        "prompt",
    ),
    "step_time": (
        "appendix_benchmarks.md", step_times, lines,
        "milliseconds of a forward by its tokens: a 22M Llama, bf16, CPU, batch 1", "tokens",
    ),
}  # fmt: skip


def data_of(name: str) -> tuple[list[str], Series]:
    """The numbers of a chart, as its page has them."""
    page, read, *_ = CHARTS[name]
    found: tuple[list[str], Series] = read((INSIDE / page).read_text())
    return found


def draw(name: str) -> tuple[Any, str]:
    """A chart and its description: its numbers as JSON."""
    _, _, kind, title, below = CHARTS[name]
    places, series = data_of(name)
    return kind(places, series, title, below), json.dumps([places, series])
