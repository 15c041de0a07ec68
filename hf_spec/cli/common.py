"""What several commands share: options, their checks, exit codes, the progress bar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Exit codes: what the user wrote is wrong; interrupted (as shells report SIGINT).
BAD_INPUT, INTERRUPTED = 2, 130
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of an option such as ``1,2,4``."""
    sizes = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"{option} {text!r}: must be numbers from 1, such as 1 or 1,2,4")
    return list(dict.fromkeys(sizes))


def check_writable(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to --output {str(output)!r}: {error.strerror}") from error


def parse_kwargs(texts: Iterable[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options such as ``prompt_lookup={"max_ngram": 3}``, by strategy.

    Raises:
        ValueError: not of that form, or the strategy does not take part.
    """
    result: dict[str, dict[str, Any]] = {}
    for text in texts:
        name = next((name for name in names if text.startswith(f"{name}=")), None)
        if name is None:
            raise ValueError(
                f"--strategy-kwargs {text!r} must be NAME=JSON with a NAME that takes part: "
                f"{', '.join(names) or 'none does'}"
            )
        options = json_object(f"--strategy-kwargs {text!r}", text[len(name) + 1 :])
        result.setdefault(name, {}).update(options)
    return result


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """The JSON object that a command-line option gives; empty if it is not given.

    Raises:
        ValueError: naming ``option``; it is no JSON, or no object.
    """
    try:
        value = json.loads(text) if text is not None else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{option}: must be a JSON object, such as {{}}")
    return value


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal; gives ``update(done, total)``."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
