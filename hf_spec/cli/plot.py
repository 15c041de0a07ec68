"""``hf-spec plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_spec.cli.common import check_writable


def plot(
    folder: Annotated[Path, typer.Argument(help="Folder that search wrote.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the images.  [default: the same]"),
    ] = None,
) -> None:
    """Draw the results in a folder.

    \b
    search.json   search.png: the trials; layers.png: the skipped layers

    \b
    Examples:
      hf-spec plot ./skip
      hf-spec plot ./skip --output ./figures
    """
    from hf_spec.hub.card import SEARCH
    from hf_spec.tuning.layers.plots import plot_search

    if not (folder / SEARCH).is_file():
        raise ValueError(f"{str(folder)!r} has nothing to draw: {SEARCH} of hf-spec search")
    check_writable(target := output or folder)
    for path in plot_search(folder, target):
        typer.echo(f"plot: {path}")
