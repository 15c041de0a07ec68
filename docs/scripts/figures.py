"""Draws the figures of the documentation as SVG: ``python docs/scripts/figures.py``.

Schemes are drawn from code; the speeds in ``speed.svg`` are read from the table in
docs/inside/benchmarks.md, so that the picture cannot say anything else. ``steps_*.svg`` is what
the demo model writes, as in docs/tour.ipynb.
"""

from __future__ import annotations

import functools
import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
# Text stays text, and the same drawing is the same file.
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "hf_spec", "font.size": 11}

import charts  # noqa: E402
from charts import read_table  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from step_plots import plot_texts  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import hf_spec  # noqa: E402, F401
from hf_spec.files import write_atomically  # noqa: E402
from hf_spec.tools.demo import StepStreamer, model_folder  # noqa: E402

DOCS = Path(__file__).parent.parent
BENCHMARKS = DOCS / "inside" / "benchmarks.md"
FILLS = {
    "token": "#dcdcdc", "root": "#8fb7e8", "draft": "#cfe2f9", "probe": "#f7d08a",
    "learned": "#f3b6a6", "gone": "#ffffff", "model": "#e8e3f3", "plain": "#ffffff",
}  # fmt: skip
#: The benchmark table that ``gain.svg`` shows, and its rows by what they are called there.
GPU_TABLE = "## On a GPU"
GAINS = {
    "plain generate": "generate, eager",
    "plain generate, compiled by Transformers": "generate, compiled",
    "prompt_lookup": "prompt_lookup, eager",
    "medusa": "medusa, eager",
    "prompt_lookup, [CUDA graphs](../guides/compiled.md)": "prompt_lookup, recorded",
    "medusa, CUDA graphs": "medusa, recorded",
}
#: The one of them that the others' ratios are to.
BASELINE = "generate, compiled"
#: The benchmark table that ``speed.svg`` shows, and its columns by what they are called there.
TABLE = "### bfloat16, with AMX"
SHOWN = {"speedup (95 %)": "eager", "compiled (95 %)": "compiled"}


class Scheme:
    """Boxes and arrows on a canvas whose unit is the size of a token's box."""

    def __init__(self, width: float, height: float):
        self.figure, self.axes = plt.subplots(figsize=(width * 0.62, height * 0.62))
        self.axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
        self.axes.axis("off")

    def box(
        self, x: float, y: float, text: str, kind: str = "token", width: float = 0.84
    ) -> tuple[float, float]:
        """A box with its left edge at ``x`` and its middle at ``y``; gives the middle."""
        dashed = kind == "gone"
        self.axes.add_patch(
            plt.Rectangle(
                (x, y - 0.36), width, 0.72, facecolor=FILLS[kind],
                edgecolor="#999999" if dashed else "#333333", linestyle="--" if dashed else "-",
            )
        )  # fmt: skip
        middle = (x + width / 2, y)
        self.text(*middle, text, color="#999999" if dashed else "#111111")
        return middle

    def row(self, x: float, y: float, texts: Sequence[str], kind: str = "token") -> list[Any]:
        return [self.box(x + order, y, text, kind) for order, text in enumerate(texts)]

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        style = {"ha": "center", "va": "center", "color": "#111111", **style}
        self.axes.text(x, y, text, **style)

    def arrow(self, start: Any, end: Any, bend: float = 0.0, gap: float = 12) -> None:
        self.axes.annotate(
            "", end, start,
            arrowprops={
                "arrowstyle": "->", "color": "#333333", "shrinkA": gap, "shrinkB": gap,
                "connectionstyle": f"arc3,rad={bend}",
            },
        )  # fmt: skip


def prompt_lookup() -> Scheme:
    scheme = Scheme(14.6, 4.4)
    words = ("the", "cat", "sat", ".", "the", "cat", "ran", ".", "the", "cat")
    tokens = scheme.row(0.2, 2, words)
    scheme.text(2.6, 2.9, "prompt and output so far")
    first = scheme.row(11.2, 2.9, ["ran", ".", "the"], "draft")
    second = scheme.row(11.2, 1.1, ["sat", ".", "the"], "draft")
    for child in (first[0], second[0]):
        scheme.arrow(tokens[-1], child)
    for start, end, bend in ((tokens[6], first[0], -0.25), (tokens[2], second[0], 0.2)):
        up = 0.36 if bend < 0 else -0.36
        scheme.arrow((start[0], start[1] + up), (end[0], end[1] + up), bend=bend, gap=2)
    scheme.text(9.2, 4.2, "what followed the last tokens before")
    scheme.text(12.6, 2.0, "draft tokens")
    return scheme


def token_recycling() -> Scheme:
    scheme = Scheme(14.6, 5.0)
    root = scheme.row(0.2, 2.5, ["the", "cat"], "root")[-1]
    kept, gone = scheme.box(3.2, 3.4, "sat", "draft"), scheme.box(3.2, 1.6, "ran", "gone")
    for child in (kept, gone):
        scheme.arrow(root, child)
    scheme.text(2.6, 4.6, "a step verifies a tree")
    rows = (
        (3.9, "the cat", "sat .6  ran .2", root),
        (2.5, "cat sat", "on .7  down .2", kept),
        (1.1, "cat ran", "away .5  off .3", gone),
    )
    for y, context, following, node in rows:
        scheme.box(6.6, y, context, "token", width=1.9)
        scheme.box(8.5, y, following, "model", width=3.1)
        scheme.arrow(node, (6.6, y), gap=16)
    scheme.text(9.1, 4.8, "what the model predicts after each node,\nrejected ones too, is kept")
    scheme.box(12.6, 3.2, "on", "draft")
    scheme.box(12.6, 1.8, "down", "draft")
    for y in (3.2, 1.8):
        scheme.arrow((11.6, 2.5), (12.6, y), gap=2)
    scheme.text(13.0, 0.6, "drafts of\nlater steps")
    plt.setp(scheme.axes.texts, fontsize=9)
    return scheme


def plain() -> Scheme:
    scheme = Scheme(13.6, 3.4)
    words = ("the", "cat", "sat", "on")
    for order, word in enumerate(words):
        x = 0.2 + order * 4.1
        scheme.box(x, 1.6, word, "root" if order < 3 else "token")
        if order < 3:
            model = scheme.box(x + 1.6, 1.6, "model", "model", width=1.7)
            scheme.arrow((x + 0.84, 1.6), (x + 1.6, 1.6), gap=1)
            scheme.arrow((x + 3.3, 1.6), (x + 4.1, 1.6), gap=1)
            scheme.text(model[0], 0.7, f"step {order + 1}", fontsize=9)
    scheme.text(6.7, 2.8, "the last token runs, the next one follows: no drafts")
    return scheme


def layer_skip() -> Scheme:
    scheme = Scheme(13, 5.6)
    stacks = ((0.4, "draft, token by token", (1, 2, 4)), (7, "verify, all at once", ()))
    for x, title, skipped in stacks:
        for layer in range(6):
            kind = "gone" if layer in skipped else "model"
            scheme.box(x, 0.9 + layer * 0.78, f"layer {layer + 1}", kind, width=2.4)
        scheme.text(x + 1.2, 5.4, title)
    drafted = scheme.row(3.1, 3.6, ["d1", "d2", "d3"], "draft")
    scheme.arrow(drafted[-1], (7.2, 3.6))
    accepted = scheme.row(9.8, 3.6, ["d1", "d2"], "root")
    scheme.box(11.8, 3.6, "x", "token")
    scheme.text(4.5, 2.8, "drafted tokens")
    scheme.text((accepted[0][0] + accepted[1][0]) / 2, 2.8, "accepted")
    scheme.text(12.2, 2.8, "own")
    scheme.text(2.9, 0.2, "dashed: left out; what is drafted writes to the same cache")
    return scheme


def tree_with_probes(scheme: Scheme, x: float, groups: Sequence[int], name: str) -> None:
    """Root and three draft tokens, with so many probes under each."""
    places = [(x, 3.2), (x + 3.1, 4.1), (x + 3.1, 2.3), (x + 6.2, 4.1)]
    texts = ["root", "c1", "c2", "c3"]
    nodes = []
    for order, ((left, y), text, count) in enumerate(zip(places, texts, groups)):
        node = scheme.box(left, y, text, "draft" if order else "root")
        for probe in range(count):
            right = left + 0.66 * (probe + 0.2)
            scheme.box(right, y - 0.86, f"{name}{probe + 1}", "probe", width=0.6)
        nodes.append(node)
    for parent, child in ((0, 1), (0, 2), (1, 3)):
        scheme.arrow(nodes[parent], nodes[child])


def bita() -> Scheme:
    scheme = Scheme(13.6, 5.2)
    scheme.row(0.2, 3.2, ["p1", "p2"], "learned")
    scheme.row(2.4, 3.2, ["the", "cat"])
    scheme.text(1.1, 2.4, "prompt tokens")
    scheme.text(1.1, 1.9, "(seen by masks only)", fontsize=9)
    tree_with_probes(scheme, 4.7, (3, 3, 3, 3), "m")
    scheme.text(8.2, 0.5, "mask tokens under every node predict the tokens behind the next one")
    return scheme


def space() -> Scheme:
    scheme = Scheme(13.6, 5.2)
    scheme.row(0.4, 3.2, ["the", "cat", "sat"])
    tree_with_probes(scheme, 4.7, (3, 3, 3, 3), "m")
    scheme.text(2.0, 2.0, "base weights alone:\noutput unchanged")
    scheme.text(
        8.2, 0.5, "mask tokens (orange) also pass through low-rank updates; nothing else does"
    )
    return scheme


def ppd() -> Scheme:
    scheme = Scheme(13.6, 5.2)
    scheme.row(0.4, 3.2, ["the", "cat", "sat"])
    tree_with_probes(scheme, 4.7, (3, 2, 0, 3), "p")
    scheme.text(
        7.0, 0.5, "prompt tokens stand where a step is likely to end, none under unlikely nodes"
    )
    return scheme


def heads(scheme: Scheme, x: float) -> None:
    hidden = scheme.box(x, 2.6, "h", "model")
    scheme.text(hidden[0], 0.8, "final hidden state\nof the last token", fontsize=9)
    for head in range(4):
        y = 4.3 - head * 1.0
        middle = scheme.box(x + 2.6, y, f"head {head + 1}", "learned", width=1.5)
        scheme.arrow(hidden, (x + 2.8, y))
        scheme.arrow((middle[0] + 0.75, y), (x + 5.1, y), gap=2)
        scheme.text(x + 5.2, y, f"token t + {head + 2}", ha="left")


def medusa() -> Scheme:
    scheme = Scheme(14.6, 5.2)
    heads(scheme, 0.4)
    root = scheme.box(8.9, 2.6, "root", "root")
    nodes = {
        "sat": (10.6, 3.6), "ran": (10.6, 1.6),
        "on": (12.2, 4.2), "by": (12.2, 3.0), "to": (12.2, 1.6),
    }  # fmt: skip
    made = {text: scheme.box(x, y, text, "draft") for text, (x, y) in nodes.items()}
    for start, end in ((root, "sat"), (root, "ran"), (made["sat"], "on"), (made["sat"], "by")):
        scheme.arrow(start, made[end])
    scheme.arrow(made["ran"], made["to"])
    scheme.text(11.2, 0.5, "their likeliest tokens: a tree")
    return scheme


def eagle3() -> Scheme:
    scheme = Scheme(15.4, 5.4)
    for layer, text in enumerate(("early", "middle", "late")):
        y = 1.4 + layer * 1.2
        scheme.box(0.4, y, f"{text} layer", "model", width=2.4)
        scheme.arrow((2.9, y), (4.3, 2.6), gap=2)
    scheme.box(4.4, 2.6, "fc", "learned")
    scheme.text(1.6, 0.4, "states of the last verified token", fontsize=9)
    for order, (token, drafted) in enumerate((("root", "d1"), ("d1", "d2"), ("d2", "d3"))):
        x = 6.2 + order * 3.1
        box = scheme.box(x, 2.6, "decoder", "learned", width=2.0)
        scheme.box(x + 0.58, 1.0, token, "draft" if order else "root")
        scheme.arrow((box[0], 1.4), (box[0], 2.2), gap=1)
        scheme.box(x + 0.58, 4.3, drafted, "draft")
        scheme.arrow((box[0], 3.0), (box[0], 3.9), gap=1)
        scheme.arrow((x - 0.9, 2.6), (x, 2.6), gap=1)
    scheme.text(10.3, 0.3, "its own output stands for states that the model has yet to compute")
    return scheme


def block(markov: bool) -> Scheme:
    """A block behind the base's states; with a Markov head, each prediction sees the one before."""
    scheme = Scheme(14.2, 6.2 if markov else 5.2)
    scheme.text(2.0, 0.6, "states of the base,\nall tokens so far", fontsize=9)
    context = [scheme.box(0.6 + order, 1.7, "c", "model") for order in range(3)]
    inputs = [scheme.box(5.0, 1.7, "root", "root")]
    inputs += scheme.row(6.0, 1.7, ["[M]"] * 3, "learned")
    scheme.text(6.9, 0.6, "a block: root and mask tokens", fontsize=9)
    scheme.box(4.9, 2.9, "small decoder", "learned", width=4.0)
    scheme.arrow((context[-1][0] + 0.4, context[-1][1]), (5.0, 2.8), bend=-0.2, gap=4)
    scheme.text(3.6, 2.9, "keys, values", fontsize=9)
    first = 0 if markov else 1
    for order, place in enumerate(range(first, 4)):
        x, y = inputs[place]
        scheme.arrow((x, y + 0.3), (x, 2.6), gap=2)
        scheme.arrow((x, 3.2), (x, 4.0), gap=2)
        scheme.box(x - 0.42, 4.3, f"t+{order + 2}", "draft")
        if markov and order:
            scheme.arrow((x - 1, 4.6), (x, 4.6), bend=-0.7, gap=2)
    if markov:
        scheme.text(6.9, 5.6, "Markov head: the token before", fontsize=9)
    scheme.text(9.4, 4.3, "their likeliest tokens: a tree", ha="left")
    return scheme


def dflash() -> Scheme:
    return block(markov=False)


def dspark() -> Scheme:
    return block(markov=True)


def propd() -> Scheme:
    scheme = Scheme(13.4, 5.4)
    nodes = ["root", "c1", "c2", "c3", "c4", "c5"]
    for layer in range(2):
        scheme.box(0.4, 0.8 + layer * 0.8, "early layers", "model", width=6.6)
    scheme.row(0.6, 2.6, nodes[:1], "root")
    scheme.row(1.6, 2.6, nodes[1:], "draft")
    head = scheme.box(8.2, 2.6, "early head", "learned", width=2.4)
    scheme.arrow((6.5, 2.6), (head[0] - 1.2, 2.6), gap=2)
    scheme.text(9.4, 1.8, "drops the unlikely", fontsize=9)
    for layer in range(2):
        scheme.box(0.4, 4.3 + layer * 0.8, "other layers", "model", width=6.6)
    for order, node in enumerate(nodes):
        kind = "gone" if node in ("c2", "c4", "c5") else "root" if node == "root" else "draft"
        scheme.box(0.6 + order, 3.45, node, kind)
    scheme.text(9.4, 3.45, "what is left runs on")
    return scheme


def mtp() -> Scheme:
    scheme = Scheme(13.4, 4.9)
    states, tokens = ["h1", "h2", "h3"], ["t2", "t3", "t4"]
    above = scheme.row(0.4, 4.2, states, "model")
    below = scheme.row(0.4, 1.0, tokens, "token")
    scheme.text(1.8, 4.85, "states of the model", fontsize=9)
    scheme.text(1.8, 0.3, "the tokens after them", fontsize=9)
    for state, token in zip(above, below):
        scheme.arrow(state, (state[0], 2.9), gap=8)
        scheme.arrow(token, (token[0], 2.3), gap=8)
    scheme.box(0.3, 2.6, "MTP layer", "learned", width=3.0)
    right = 3.3
    for name in ("t5?", "t6?", "t7?"):
        made = scheme.box(right + 0.9, 1.0, name, "draft")
        scheme.arrow((right, 2.4), (made[0], 1.4), gap=2)
        if name != "t7?":
            scheme.arrow((right, 2.6), (right + 2.2, 2.6), gap=2)
            scheme.box(right + 2.2, 2.6, "MTP layer", "learned", width=1.9)
            scheme.arrow((made[0], 1.4), (right + 2.5, 2.2), gap=2)
            right += 4.1
    scheme.text(8.4, 3.7, "then it takes its own output: level by level")
    return scheme


def draft_model() -> Scheme:
    scheme = Scheme(13.4, 4.6)
    text = scheme.row(0.3, 2.3, ["the", "cat"], "token")
    for layer in range(2):
        scheme.box(3.0, 2.0 + layer * 0.76, "assistant", "learned", width=2.4)
    scheme.arrow(text[-1], (3.0, 2.3))
    first = scheme.box(6.4, 3.2, "sat", "draft")
    other = scheme.box(6.4, 1.4, "ran", "draft")
    scheme.arrow((5.4, 2.4), first, gap=10)
    scheme.arrow((5.4, 2.4), other, gap=10)
    for parent, words, y in ((first, ("on", "."), 3.2), (other, ("to",), 1.4)):
        for order, word in enumerate(words):
            scheme.arrow(parent, scheme.box(8.0, y + 0.5 - 0.9 * order, word, "draft"))
    for layer in range(5):
        scheme.box(10.4, 0.8 + layer * 0.76, "model", "model", width=2.4)
    scheme.arrow((8.9, 2.4), (10.4, 2.4), gap=6)
    scheme.text(7.6, 0.3, "a tree, which the model verifies")
    return scheme


def architecture() -> Scheme:
    scheme = Scheme(15.4, 6.2)
    steps = [
        ("draft", "drafter", "tree with\nprobabilities"),
        ("cut", "policy", "nodes that\npay off"),
        ("forward", "target", "one pass,\ntree mask"),
        ("verify", "acceptance", "longest path\nof the target"),
        ("commit", "cache", "keep the path,\nemit tokens"),
        ("learn", "policy, drafter", "times,\nacceptance"),
    ]
    middles = []
    for order, (name, who, what) in enumerate(steps):
        x = 0.2 + order * 2.55
        middles.append(scheme.box(x, 3.4, name, "root", width=2.0))
        scheme.text(x + 1.0, 4.15, who, fontsize=10, style="italic")
        scheme.text(x + 1.0, 2.45, what, fontsize=9)
    for start, end in zip(middles, middles[1:]):
        scheme.arrow((start[0] + 1.0, 3.4), (end[0] - 1.0, 3.4), gap=1)
    start, end = middles[-1], middles[0]
    scheme.arrow((start[0], 1.9), (end[0], 1.9), bend=-0.14, gap=2)
    scheme.text(7.6, 0.35, "next step, until every sequence has ended")
    scheme.box(0.2, 5.6, "prefill", "token", width=2.0)
    scheme.arrow((1.2, 5.3), (1.2, 4.4), gap=1)
    scheme.text(2.5, 5.6, "as in plain generation", ha="left", fontsize=9)
    return scheme


@functools.cache
def tour() -> tuple[Any, dict[str, Any]]:
    """The tokenizer, and the tour's text by its steps, plain and with Medusa's heads."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype="float32")
    tok = AutoTokenizer.from_pretrained(model_folder())
    model.load_adapter(str(model_folder().parent / "adapters" / "medusa"))
    prompt = (
        "class TourMLP(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
    )
    inputs = tok(f"{prompt}        self.config = config\n", return_tensors="pt")
    always = {"assistant_strategy": "medusa", "assistant_kwargs": {"drafting": "always"}}
    runs = {}
    for name, strategy in (("plain generate", {}), ("medusa", always)):
        streamer = StepStreamer()
        model.generate(**inputs, max_new_tokens=46, do_sample=False, streamer=streamer, **strategy)
        runs[name] = streamer.steps
    return tok, runs


def steps(name: str) -> Scheme:
    """The tour's text in a color for each step; one picture each, so that phones stack them."""
    tok, runs = tour()
    return drawn(plot_texts(tok, {name: runs[name]}, width=46, columns=1))


def steps_plain() -> Scheme:
    return steps("plain generate")


def steps_medusa() -> Scheme:
    return steps("medusa")


def speed() -> Scheme:
    """Speed of strategies over plain generate on SmolLM2."""
    names, rows = read_speeds(BENCHMARKS.read_text())
    figure, axes = plt.subplots(figsize=(9.6, 4.2))
    for order, (label, values) in enumerate(rows.items()):
        shown = [(place, value) for place, value in enumerate(values) if value is not None]
        places = [place + (order - 0.5) * 0.38 for place, _ in shown]
        heights = [value for _, value in shown]
        bars = axes.bar(places, heights, 0.36, label=label, color=("#3f6fb5", "#a9c6ec")[order])
        axes.bar_label(bars, fmt="%.2f", fontsize=9)
    axes.axhline(1.0, color="#b33333", linewidth=1, linestyle="--", label="plain generate")
    axes.set(xticks=range(len(names)), xticklabels=names, ylabel="speed over plain generate")
    axes.tick_params("x", rotation=30)
    plt.setp(axes.get_xticklabels(), ha="right", rotation_mode="anchor")
    axes.spines[["top", "right"]].set_visible(False)
    highest = max(value for values in rows.values() for value in values if value is not None)
    axes.set_ylim(0, highest * 1.18)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    return drawn(figure)


def drawn(figure: Any) -> Scheme:
    """A scheme of a figure that is drawn already."""
    scheme = Scheme.__new__(Scheme)
    scheme.figure = figure
    return scheme


def gain() -> Scheme:
    """Tokens per second on a GPU, plain and with strategies, and ratios to the faster plain one."""
    found = read_gains(BENCHMARKS.read_text())
    figure, axes = plt.subplots(figsize=(5.4, 2.9))
    colors = ["#b9b9b9" if name.startswith("generate") else "#3f6fb5" for name in found]
    bars = axes.barh(list(found), list(found.values()), 0.66, color=colors)
    ratios = [f"{value / found[BASELINE]:.2f}x" for value in found.values()]
    labels = [f"{value:g}  ({ratio})" for value, ratio in zip(found.values(), ratios)]
    axes.bar_label(bars, labels, padding=4)
    axes.invert_yaxis()
    axes.set(xlim=(0, max(found.values()) * 1.3), xticks=[])
    axes.set_title(
        "Tokens per second (and ratio to compiled generate):\n"
        "one H200, one request, shape of an 8B, 2026-11-27",
        fontsize=11, loc="left", x=-0.42,
    )  # fmt: skip
    axes.tick_params("y", length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    return drawn(figure)


def read_gains(text: str) -> dict[str, float]:
    """Tokens per second of the rows of `GAINS`, by their names in the picture."""
    cells = {name: speed for name, speed, *_ in read_table(text, GPU_TABLE)[1]}
    return {shown: float(cells[name]) for name, shown in GAINS.items()}


def choose() -> Scheme:
    """Which strategy to begin with."""
    scheme = Scheme(9.6, 7.6)
    questions = [
        ("MTP layers\nin the checkpoint?", "mtp"),
        ("a released drafter\nfor it?", "hf-spec import:\neagle3, dflash, dspark"),
        ("minutes of a GPU\nfor training?", "hf-spec distill,\nthen train medusa"),
        ("a much smaller model\nwith its tokenizer?", "draft_model"),
    ]
    for order, (question, answer) in enumerate(questions):
        y = 6.8 - 1.5 * order
        asked = scheme.box(0.3, y, question, "root", width=3.7)
        scheme.arrow((4.0, y), (5.5, y), gap=2)
        scheme.text(4.7, y + 0.25, "yes", fontsize=9)
        scheme.box(5.5, y, answer, "draft", width=3.9)
        scheme.arrow((asked[0], y - 0.36), (asked[0], y - 1.14), gap=1)
        scheme.text(asked[0] + 0.5, y - 0.75, "no", fontsize=9)
    scheme.box(0.3, 0.8, "token_recycling", "draft", width=3.7)
    plt.setp(scheme.axes.texts, fontsize=9)  # two lines in a box
    return scheme


def read_speeds(text: str) -> tuple[list[str], dict[str, list[float | None]]]:
    """Contenders and, eager and compiled, their speedups, as the benchmark page has them, fastest
    first; None for what was not measured.

    Raises:
        ValueError: the page has no such table or column.
    """
    head, rows = read_table(text, TABLE)
    if not {*SHOWN} <= {*head}:
        raise ValueError(f"{BENCHMARKS} has no table with {list(SHOWN)} below {TABLE!r}")
    contenders = {row[0]: row for row in rows if row[0] != "generate"}
    speeds = {
        label: [speed_in(row[head.index(column)]) for row in contenders.values()]
        for column, label in SHOWN.items()
    }
    first = next(iter(speeds.values()))
    names = list(contenders)
    order = sorted(range(len(names)), key=lambda place: -(first[place] or 0.0))
    return [names[i] for i in order], {
        label: [values[i] for i in order] for label, values in speeds.items()
    }


def speed_in(cell: str) -> float | None:
    """The speedup that a cell begins with, if it is not empty."""
    found = re.match(r"([\d.]+)x", cell)
    return None if found is None else float(found[1])


FIGURES: dict[str, Callable[[], Scheme]] = {
    function.__name__: function
    for function in (
        gain, speed, choose, steps_plain, steps_medusa, architecture, plain, token_recycling,
        prompt_lookup, layer_skip, bita, space, ppd, medusa, eagle3, propd, mtp, draft_model,
        dflash, dspark,
    )
}  # fmt: skip


def main(target: Path = DOCS / "figures") -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        write(target / f"{name}.svg", draw().figure)
    for name in charts.CHARTS:
        write(target / f"{name}.svg", *charts.draw(name))


def write(path: Path, figure: Any, description: str | None = None) -> None:
    file, facts = io.BytesIO(), {"Date": None, "Description": description}
    figure.savefig(file, format="svg", bbox_inches="tight", facecolor="white", metadata=facts)
    plt.close(figure)
    write_atomically(path, file.getvalue().decode())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
