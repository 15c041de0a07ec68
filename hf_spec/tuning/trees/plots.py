"""Draws tuned trees and why they were chosen, from ``tree.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hf_spec.bench.figures import new_figure, plot_points, save_figure
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeState, TreeStates
from hf_spec.hub.folder import read_tree_file
from hf_spec.tuning.trees.sparse_tree import Array, chances_of

TREE_PLOT, TUNE_PLOT = "tree.png", "tune.png"
#: Largest number of nodes labelled with their probability; more would overlap.
LABELLED = 40


def plot_trees(folder: Path, target: Path) -> list[Path]:
    """Draw a folder's ``tree.json`` in ``target``: ``tune.png``, and ``tree.png`` for each device
    and setting, numbered if there are several.

    Raises:
        ValueError: the file cannot be read.
    """
    data = read_tree_file(folder)
    assert data is not None
    trees = [draw_trees(entry, one) for entry in data["devices"] for one in entry["settings"]]
    names = [TREE_PLOT]
    if len(trees) > 1:
        names = [f"tree-{number}.png" for number in range(1, len(trees) + 1)]
    figures = [(TUNE_PLOT, draw_tuning(data)), *zip(names, trees)]
    return [save_figure(figure, target / name) for name, figure in figures]


def draw_trees(entry: dict[str, Any], chosen: dict[str, Any]) -> Any:
    """A figure with the tree of each state that has candidates and occurs.

    Args:
        entry: an entry of ``tree.json``, for one device.
        chosen: one of its settings.
    """
    states = TreeStates.from_json(chosen["states"]).states
    accuracies = np.array(entry["landed_accuracies"])
    occurs = [share > 0 for share in chosen["visits"]]  # without probes only the last state does
    shown = [k for k, state in enumerate(states) if len(state.tree) > 1 and occurs[k]] or [0]
    probed = any(any(state.probes) for state in states)
    width = max(6.0, 0.32 * max(len(states[k].tree) for k in shown))
    depths = [states[k].tree.max_depth for k in shown]
    figure = new_figure(width, sum(1.6 + 1.1 * depth for depth in depths))
    axes = figure.subplots(len(shown), squeeze=False, height_ratios=[1.5 + d for d in depths])
    for k, one in zip(shown, axes[:, 0]):
        _tree(one, states[k], accuracies)
        share = chosen["visits"][k]
        one.set_title(
            f"{k} token{'s' * (k != 1)} predicted: {states[k].tree.num_candidates} candidates"
            + (f", {(n := sum(states[k].probes))} probe{'s' * (n != 1)}" if probed else "")
            + f"; {share:.0%} of steps",
            fontsize=10,
        )
    figure.suptitle(
        f"{entry['device']}, {entry['dtype']}, batch {chosen['batch_size']}, context "
        f"{chosen['context']}: {chosen['size']} step tokens, tau {chosen['tau']:.2f}\n"
        "numbers: probability of being accepted in %"
        + ("; +n: probes under a node" if probed else ""),
        fontsize=10,
    )
    return figure


def positions(tree: TokenTree) -> Array:
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


def _tree(axes: Any, state: TreeState, accuracies: Array) -> None:
    tree, places = state.tree, positions(state.tree)
    reach, _ = chances_of(tree, accuracies)
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        axes.plot(
            [places[parent], places[node]], [-tree.depths[parent], -tree.depths[node]],
            color="0.7", linewidth=0.5 + 3 * reach[node], zorder=1,
        )  # fmt: skip
    depths = -np.array(tree.depths)
    axes.scatter(
        places, depths, c=reach, cmap="Blues", vmin=-0.2, vmax=1, s=260, zorder=2, edgecolor="0.4"
    )
    look = {"ha": "center", "fontsize": 6, "zorder": 3}
    for node, place in enumerate(zip(places, depths)):
        if len(tree) <= LABELLED:
            digits = 0 if reach[node] >= 0.095 else 1
            text = f"{100 * reach[node]:.{digits}f}"
            colour = "white" if reach[node] > 0.6 else "black"
            axes.annotate(text, place, va="center", color=colour, **look)
        if state.probes[node]:
            below = {"xytext": (0, -15), "textcoords": "offset points"}
            axes.annotate(f"+{state.probes[node]}", place, color="tab:red", **below, **look)
    axes.set(ylim=(-tree.max_depth - 0.6, 0.5), xlim=(places.min() - 0.8, places.max() + 0.8))
    axes.set_yticks(range(-tree.max_depth, 1), [str(d) for d in range(tree.max_depth, -1, -1)])
    axes.set_xticks([])
    axes.set_ylabel("depth")
    axes.spines["bottom"].set_visible(False)


def draw_tuning(data: dict[str, Any]) -> Any:
    """A figure of tau, step time and predicted speedup by step tokens (PPD, figure 6.6).

    Tau is that of the latest entry, as it hardly depends on the device. Times are those of every
    device, batch size and context length.

    Args:
        data: the content of ``tree.json``.
    """
    figure = new_figure(14, 4)
    left, middle, right = figure.subplots(1, 3)
    sizes = data["devices"][-1]["sizes"]
    counts = [one["size"] for one in sizes]
    for key, label in (("tau", "tuned"), ("static_tau", "static"), ("random_tau", "random")):
        left.plot(counts, [one[key] for one in sizes], label=label)
    left.set(xlabel="step tokens", ylabel="tau (tokens per forward pass)", title="acceptance")
    left.legend()
    for entry in data["devices"]:
        for one in entry["settings"]:
            label = f"{entry['device'][:24]}, batch {one['batch_size']}, context {one['context']}"
            counts = [size["size"] for size in entry["sizes"]]
            plain = one["plain_seconds"]
            measured = sorted((int(n), spent / plain) for n, spent in one["seconds"].items())
            plot_points(middle, measured, "o-", markersize=3, label=label)
            (line,) = right.plot(counts, one["speedups"], label=label)
            right.plot(one["size"], one["speedup"], "*", color=line.get_color(), markersize=13)
    middle.set(xlabel="step tokens", ylabel="time / plain step", title="step time")
    right.set(xlabel="step tokens", ylabel="predicted speedup", title="speedup (star: chosen)")
    right.axhline(1.0, color="0.4", linestyle=":")
    middle.legend(fontsize=7)
    return figure
