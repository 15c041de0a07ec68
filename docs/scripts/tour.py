"""Runs docs/tour.ipynb and stores its outputs in it: ``python docs/scripts/tour.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from hf_spec.files import write_atomically

TOUR = Path(__file__).parent.parent / "tour.ipynb"
#: Longest that a cell may take, in seconds.
TIMEOUT = 300


def run(notebook: Any, folder: Path) -> None:
    """Run all cells of a notebook in a new kernel, without warnings; outputs are replaced.

    Args:
        notebook: as nbformat reads it.
        folder: the kernel's working directory.

    Raises:
        CellExecutionError: a cell fails.
    """
    NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    ).execute(env={**os.environ, "PYTHONWARNINGS": "ignore"})  # fmt: skip
    # The same run is the same file, whichever Python it was.
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def main() -> None:
    notebook = nbformat.read(TOUR, as_version=4)
    run(notebook, TOUR.parent)
    write_atomically(TOUR, nbformat.writes(notebook) + "\n")


if __name__ == "__main__":
    main()
