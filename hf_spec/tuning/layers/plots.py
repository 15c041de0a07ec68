"""Draws a search from its ``search.json``; matplotlib is imported when drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hf_spec.bench.figures import new_figure, save_figure
from hf_spec.hub.card import SEARCH
from hf_spec.hub.folder import read_json

SEARCH_PLOT, LAYERS_PLOT = "search.png", "layers.png"
KEPT, ATTENTION, MLP = "0.85", "tab:red", "tab:blue"
MARKERS = {"searched": "*", "first": "<", "middle": "d", "last": ">", "random": "X"}


def read_search(folder: Path) -> dict[str, Any]:
    """The ``search.json`` of a folder.

    Raises:
        ValueError: it is no result of ``hf-spec search``.
    """
    path = folder / SEARCH
    data = read_json(path)
    if not {"trials", "best", "layers", "settings"} <= data.keys():
        raise ValueError(f"{str(path)!r} is not the result of hf-spec search")
    return data


def plot_search(folder: Path, target: Path) -> list[Path]:
    """Draw a folder's ``search.json`` as ``search.png`` and ``layers.png`` in ``target``."""
    data = read_search(folder)
    drawn = ((SEARCH_PLOT, draw_search), (LAYERS_PLOT, draw_layers))
    return [save_figure(draw(data), target / name) for name, draw in drawn]


def draw_search(data: dict[str, Any]) -> Any:
    """The figure ``search.png``: value by trial, and speedup by number of skipped sublayers.

    The right panel is figure 4 of Draft & Verify (Zhang et al., 2023).
    """
    trials, best = data["trials"], data["best"]
    objective = data["settings"]["objective"]
    complete = [one for one in trials if one["state"] == "complete"]
    pruned = [one for one in trials if one["state"] == "pruned"]
    figure = new_figure(11, 4)
    left, right = figure.subplots(1, 2)
    crosses = {"marker": "x", "color": "0.6"}
    for label, own, look in (("complete", complete, {}), ("pruned", pruned, crosses)):
        numbers, values = [one["number"] for one in own], [one["value"] for one in own]
        left.scatter(numbers, values, s=14, label=label, **look)
    so_far = np.minimum.accumulate([one["value"] for one in complete])
    numbers = [one["number"] for one in complete]
    left.step(numbers, so_far, where="post", color="tab:red", label="best")
    left.axhline(1.0, color="0.4", linestyle=":", label="plain decoding")
    left.set(xlabel="trial", ylabel=f"time per token / plain ({objective})", title="search")
    left.legend()

    envelope: dict[int, float] = {}
    for one in complete:
        envelope[one["skipped"]] = max(envelope.get(one["skipped"], 0.0), one["speedup"])
    right.scatter([t["skipped"] for t in complete], [t["speedup"] for t in complete], s=14)
    right.plot(sorted(envelope), [envelope[n] for n in sorted(envelope)], "--", color="0.5")
    right.plot(best["skipped"], best["speedup"], "*", color="tab:red", markersize=14, label="best")
    # Baselines are judged on held-out prompts if there are any, and the choice beside them.
    others = ", held out" if data.get("held_out") else ""
    for row in data.get("baselines") or ():
        if row["name"] in MARKERS and (others or row["name"] != "searched"):
            right.plot(
                best["skipped"], row["speedup"], MARKERS[row["name"]], color="tab:orange",
                markersize=8, label=row["name"] + others,
            )  # fmt: skip
    right.axhline(1.0, color="0.4", linestyle=":")
    right.set(
        xlabel="skipped sublayers", ylabel=f"speedup ({objective})",
        title=f"of {2 * data['layers']} sublayers",
    )  # fmt: skip
    right.legend()
    return figure


def draw_layers(data: dict[str, Any]) -> Any:
    """The figure ``layers.png``: a square per sublayer, coloured if drafting skips it.

    It is figure 6 of Draft & Verify (Zhang et al., 2023).
    """
    from matplotlib.patches import Rectangle

    count, best = data["layers"], data["best"]
    figure = new_figure(max(4.0, 1.2 + 0.32 * count), 1.5)
    axes = figure.subplots()
    for row, (layers, colour) in enumerate(
        ((best["skip_mlp"], MLP), (best["skip_attention"], ATTENTION))
    ):
        for layer in range(count):
            face = colour if layer in layers else KEPT
            axes.add_patch(Rectangle((layer + 0.06, row + 0.06), 0.88, 0.88, facecolor=face))
    every = max(1, count // 20)
    axes.set(
        xlim=(0, count), ylim=(0, 2), yticks=(0.5, 1.5), yticklabels=("MLP", "attention"),
        xticks=[i + 0.5 for i in range(0, count, every)], xticklabels=range(0, count, every),
        xlabel="layer", aspect="equal",
        title=f"drafting skips {len(best['skip_attention'])} attention and "
        f"{len(best['skip_mlp'])} MLP sublayers",
    )  # fmt: skip
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure
