"""Shared by several commands: exit codes, checks before the work, the progress bar."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Exit, echo
from typer.core import TyperCommand

from hf_spec.core.checks import check_choice, duration, install_extra

if TYPE_CHECKING:
    from hf_spec.tools.bench.contenders import Adapter

#: Value of ``--strategy`` for plain ``generate``.
NO_STRATEGY = "none"
#: Exit codes: invalid input; interrupted (as shells report SIGINT).
BAD_INPUT, INTERRUPTED = 2, 130


class Command(TyperCommand):
    """A command that works with the library; its help does not."""

    def invoke(self, ctx: Any) -> Any:
        library: Any = sys.modules["hf_spec"]
        if not hasattr(library, "__version__"):  # made by the entry point, and not run yet
            library.__spec__.loader.exec_module(library)
        return super().invoke(ctx)


def require(extra: str, *packages: str) -> None:
    """Raise an ImportError unless these optional packages are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"this needs packages that are not installed ({', '.join(missing)}); "
            f"{install_extra(extra)}"
        )


def single_strategy(name: str | None, adapters: Sequence[Adapter], default: str) -> str | None:
    """The strategy of a command that runs only one: ``name``, which may be ``auto``, that of the
    only adapter, or ``default``; None for plain ``generate``."""
    import hf_spec
    from hf_spec.drafting.options import AUTO
    from hf_spec.methods.registry import get_method

    name = name or (adapters[0].strategy if len(adapters) == 1 else default)
    if name in (NO_STRATEGY, AUTO):
        return name if name == AUTO else None
    check_choice("strategy", name, [NO_STRATEGY, AUTO, *hf_spec.strategies()])
    if get_method(name).needs_adapter and all(one.strategy != name for one in adapters):
        raise ValueError(f"strategy {name!r} needs a trained adapter: give --adapter")
    return name


def check_writable(folder: Path, option: str = "--output") -> None:
    """Make a folder; raise a ValueError naming the option if files cannot be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(f"cannot write to {option} {str(folder)!r}: {error.strerror}") from error


def stop_without(measurements: Sequence[Any]) -> None:
    """Exit if an interrupt came before anything was measured: earlier results stay."""
    if not measurements:
        echo("interrupted before anything was measured; nothing was written", err=True)
        raise Exit(INTERRUPTED)


@contextmanager
def explained_interrupt(outcome: str) -> Iterator[None]:
    """If the block is interrupted, say what became of the command's work, and exit."""
    try:
        yield
    except KeyboardInterrupt:
        echo(f"interrupted; {outcome}", err=True)
        raise Exit(INTERRUPTED) from None


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, if that is a terminal.

    Gives ``update(done, total, note="")``, whose note stands after the bar. Without a terminal it
    prints a line every 30 seconds, with the time left by the pace since the first number.
    """
    from tqdm import tqdm

    shown = sys.stderr.isatty()
    told, first = time.monotonic(), (0.0, -1)  # the time and number of the first report
    with tqdm(desc=title, leave=False, dynamic_ncols=True, disable=not shown) as bar:

        def update(done: int, total: int, note: str = "") -> None:
            nonlocal told, first
            if shown:
                bar.n, bar.total = done, total
                bar.set_postfix_str(note)
                return
            now = time.monotonic()
            if first[1] < 0:
                told, first = now, (now, done)
            elif done > first[1] and now - told > 30:
                told = now
                left = duration((now - first[0]) * (total - done) / (done - first[1]))
                parts = (f"{done} of {total}", note, f"about {left} left")
                echo(f"{title}: {', '.join(filter(None, parts))}", err=True)

        yield update
