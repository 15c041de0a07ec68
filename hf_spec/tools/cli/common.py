"""Shared by several commands: exit codes, checks before the work, results."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer import Exit, echo
from typer.core import TyperCommand

from hf_spec.core.checks import check_choice, install_extra
from hf_spec.tools.loading import Adapter, check_adapter

#: Value of ``--strategy`` for plain ``generate``.
NO_STRATEGY = "none"
#: Exit codes: invalid input; interrupted (as shells report SIGINT).
BAD_INPUT, INTERRUPTED = 2, 130


class Command(TyperCommand):
    """A command that works with the library; its help does not."""

    def invoke(self, ctx: Any) -> Any:
        for name in ("folder", "adapter"):  # what a JSON file is enough to refuse
            value = ctx.params.get(name)
            for place in value if isinstance(value, list) else [value]:
                if place is not None:
                    check_adapter(str(place), folder=name == "folder")
        load_library()
        return super().invoke(ctx)


def load_library() -> None:
    """Run ``hf_spec/__init__.py``, which takes seconds, if it waits for this."""
    library: Any = sys.modules["hf_spec"]
    if library._waits:
        importlib.reload(library)


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


def check_writable(folder: Path) -> None:
    """Make the output folder; raise a ValueError if files cannot be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"cannot write into the folder --output {str(folder)!r}: {error.strerror}"
        ) from error


def show_results(
    result: Any, environment: dict[str, Any], output: Path, by_task: bool = False,
    as_json: bool = False, phases: bool = True,
) -> None:  # fmt: skip
    """Write and print what was measured, with ``phases`` where the time went; exit if it was
    interrupted. If that came before anything was measured, earlier results stay."""
    from hf_spec.tools.bench import report

    if not result.measurements:
        echo("interrupted before anything was measured; nothing was written", err=True)
        raise Exit(INTERRUPTED)
    target = output / "results.json"
    report.write_results(target, result, environment)
    if as_json:
        echo(json.dumps(result.rows, indent=1))
    else:
        echo(report.described(result, by_task, phases))
        echo(f"results: {target}")
    if result.interrupted:
        raise Exit(INTERRUPTED)


@contextmanager
def explained_interrupt(outcome: str) -> Iterator[None]:
    """If the block is interrupted, say what became of the command's work, and exit."""
    try:
        yield
    except KeyboardInterrupt:
        echo(f"interrupted; {outcome}", err=True)
        raise Exit(INTERRUPTED) from None
