"""Files are written in one step, so that whoever reads one sees the old content or the new; JSON
files are read with errors that name them."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path`` that takes its place if the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file, with one line break at its end, in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """A JSON object from a file, empty if an optional one is missing; a ValueError names the file
    if it holds none."""
    if optional and not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object")
    return data


@contextmanager
def exclusive(lock: Path, refusal: str) -> Iterator[None]:
    """Keep a second process out, with a ValueError that says ``refusal``; the lock ends with the
    process, however it ends."""
    from filelock import FileLock, Timeout

    try:
        held = FileLock(str(lock)).acquire(timeout=0)
    except Timeout as error:
        raise ValueError(refusal) from error
    with held:
        yield
