"""The progress bar of whatever takes more than a few seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr; without a terminal, a line at once and every 30 seconds.

    Gives ``update(done, total, note="")``, whose note stands after the numbers.
    """
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    lines = "{desc}: {n_fmt} of {total_fmt}{postfix}, {remaining} left\n"
    with tqdm(
        desc=title, leave=False, dynamic_ncols=terminal, disable=not shown,
        mininterval=0.1 if terminal else 30, bar_format=None if terminal else lines, delay=1e-3,
    ) as bar:  # fmt: skip

        def update(done: int, total: int, note: str = "") -> None:
            first = bar.total is None
            if first:  # what was done before says nothing about the time left
                bar.initial = bar.n = done
            bar.total = total
            bar.set_postfix_str(note, refresh=first)
            bar.update(done - bar.n)

        yield update
