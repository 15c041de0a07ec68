"""Shared by several commands: exit codes, checks before the work, the progress bar."""

from __future__ import annotations

import errno
import importlib.util
import logging
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

    Gives ``update(done, total)``. Its keyword ``note`` sets the text after the bar. Without a
    terminal it prints a line every 30 seconds, with the time left by the pace since the first
    number, and at once notes that come without numbers.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    told, first = time.monotonic(), (0.0, -1)  # the time and number of the first report
    console = Console(stderr=True)
    with Progress(
        "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        "{task.fields[note]}", console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(title, total=None, note="")

        def update(done: int | None = None, total: int | None = None, **shown: Any) -> None:
            nonlocal told, first
            bar.update(task, completed=done, total=total, **shown)
            now = time.monotonic()
            if not console.is_terminal and done is None and shown.get("note"):
                console.print(f"{title}: {shown['note']}", soft_wrap=True)
            if done is None or total is None:
                return
            if first[1] < 0:
                told, first = now, (now, done)
            elif not console.is_terminal and done > first[1] and now - told > 30:
                told = now
                left = duration((now - first[0]) * (total - done) / (done - first[1]))
                parts = (f"{done} of {total}", shown.get("note"), f"about {left} left")
                console.print(f"{title}: {', '.join(filter(None, parts))}", soft_wrap=True)

        yield update


@contextmanager
def notes(update: Callable[..., None], *names: str) -> Iterator[None]:
    """Within the block, what loggers of these names say, from INFO on, are notes of a
    :func:`progress_bar`."""
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: update(note=record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
            logger.removeHandler(handler)
