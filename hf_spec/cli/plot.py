"""``hf-spec plot``."""

import warnings
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from hf_spec.cli.common import check_writable, require


def plot(
    folder: Annotated[Path, Argument(help="Folder that hf-spec search wrote.")],
    output: Annotated[
        Path | None, Option("--output", "-o", help="Folder for the image.  [default: the same]")
    ] = None,
) -> None:
    """Draw the trials of a layer search, search.png. The card shows it after 'hf-spec card'.

    \b
    Examples:
      hf-spec plot ./skip
      hf-spec plot ./skip --output ./figures
    """
    require("search", "optuna", "matplotlib")
    from optuna.exceptions import ExperimentalWarning
    from optuna.visualization.matplotlib import plot_optimization_history

    from hf_spec.bench.figures import save_figure
    from hf_spec.search.layers import STUDY_FILE, open_study

    if not (folder / STUDY_FILE).is_file():
        raise ValueError(f"{str(folder)!r} has nothing to draw: no {STUDY_FILE} of hf-spec search")
    check_writable(target := output or folder)
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        axes = plot_optimization_history(open_study(folder), target_name="tokens per second")
    echo(f"plot: {save_figure(axes.figure, target / 'search.png')}")
