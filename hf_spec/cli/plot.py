"""``hf-spec plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_spec.cli.common import check_writable

Target = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for the images.  [default: the same]")
]
Tuned = Annotated[Path, typer.Argument(help="Adapter folder with a tree.json.")]

plot = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@plot.callback()
def plots() -> None:
    """Draw results again.

    \b
    Examples:
      hf-spec plot search ./skip
      hf-spec plot tune ./bita
      hf-spec plot tree ./bita
      hf-spec plot policy ./results
    """


@plot.command("search")
def search_plot(
    folder: Annotated[Path, typer.Argument(help="Folder that hf-spec search wrote.")],
    output: Target = None,
) -> None:
    """Draw search.png and layers.png from search.json.

    \b
    Examples:
      hf-spec plot search ./skip
      hf-spec plot search ./skip --output ./figures
    """
    from hf_spec.tuning.layers.plots import plot_search, read_search

    data = read_search(folder)
    check_writable(target := output or folder)
    for path in plot_search(data, target):
        typer.echo(f"plot: {path}")


@plot.command("tune")
def tune_plot(
    folder: Tuned,
    output: Target = None,
) -> None:
    """Draw tune.png from tree.json: tau, step time and predicted speedup by size.

    \b
    Examples:
      hf-spec plot tune ./bita
      hf-spec plot tune ./bita --output ./figures
    """
    from hf_spec.tuning.trees.plots import plot_tuning

    data = tuned(folder)
    check_writable(target := output or folder)
    typer.echo(f"plot: {plot_tuning(data, target)}")


@plot.command("tree")
def tree_plot(
    folder: Tuned,
    device: Annotated[
        str | None, typer.Option(help="Part of a device's name.  [default: the latest entry]")
    ] = None,
    setting: Annotated[
        int, typer.Option(min=1, help="Which of the device's batch sizes and contexts, from 1.")
    ] = 1,
    output: Target = None,
) -> None:
    """Draw tree.png from tree.json: the tree of each state with its probabilities and probes.

    \b
    Examples:
      hf-spec plot tree ./bita
      hf-spec plot tree ./bita --device H200 --setting 2
    """
    from hf_spec.tuning.trees.plots import entry_of, plot_trees

    entry = entry_of(tuned(folder), device)
    if setting > (known := len(entry["settings"])):
        raise ValueError(f"--setting {setting}: choose from 1 to {known}")
    check_writable(target := output or folder)
    typer.echo(f"plot: {plot_trees(entry, setting - 1, target)}")


@plot.command("policy")
def policy_plot(
    results: Annotated[Path, typer.Argument(help="results.json of hf-spec bench, or its folder.")],
    output: Target = None,
) -> None:
    """Draw policy.png from results.json: what the policy decided.

    For each strategy: the sizes of the trees chosen, the step times behind them, predicted and
    emitted tokens. For all: predicted and measured speedup.

    \b
    Examples:
      hf-spec plot policy ./results
      hf-spec plot policy ./results/results.json --output ./figures
    """
    from hf_spec.tuning.policy_plots import plot_policies, read_policies

    runs = read_policies(results)
    check_writable(target := output or (results if results.is_dir() else results.parent))
    typer.echo(f"plot: {plot_policies(runs, target)}")


def tuned(folder: Path) -> dict[str, Any]:
    """The ``tree.json`` of a folder.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    from hf_spec.hub.folder import TREE, read_tree_file

    data = read_tree_file(folder)
    if data is None:
        raise ValueError(f"{str(folder)!r} has no {TREE}: run hf-spec tune")
    return data
