"""``hf-spec plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_spec.cli.common import check_writable


def plot(
    folder: Annotated[Path, typer.Argument(help="Folder that search, tune or bench wrote.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the images.  [default: the same]"),
    ] = None,
) -> None:
    """Draw the results in a folder.

    \b
    search.json   search.png: the trials; layers.png: the skipped layers
    tree.json     tune.png: tau, step time and predicted speedup by size
                  tree.png: the tree of each state with its probabilities and probes; numbered
                  where there are several devices, batch sizes or contexts
    results.json  policy.png: the sizes of the trees that the policy chose, the step times behind
                  them, predicted and emitted tokens, predicted and measured speedup

    \b
    Examples:
      hf-spec plot ./skip
      hf-spec plot ./bita --output ./figures
      hf-spec plot ./results
    """
    from hf_spec.hub.card import RESULTS, SEARCH
    from hf_spec.hub.folder import TREE
    from hf_spec.tuning.layers.plots import plot_search
    from hf_spec.tuning.policy_plots import plot_policies
    from hf_spec.tuning.trees.plots import plot_trees

    known = {SEARCH: plot_search, TREE: plot_trees, RESULTS: plot_policies}
    found = [name for name in known if (folder / name).is_file()]
    if not found:
        raise ValueError(
            f"{str(folder)!r} has nothing to draw: {SEARCH} of hf-spec search, {TREE} of hf-spec "
            f"tune, or {RESULTS} of hf-spec bench"
        )
    check_writable(target := output or folder)
    for name in found:
        for path in known[name](folder, target):
            typer.echo(f"plot: {path}")
