"""Files are written in one step: whoever reads one sees the old content or the new."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


@contextmanager
def exclusive(lock: Path, refusal: str) -> Iterator[None]:
    """Keep a second process out; the lock ends with the process, however it ends.

    Raises:
        ValueError: ``refusal``, where another process holds the lock.
    """
    from filelock import FileLock, Timeout

    try:
        held = FileLock(str(lock)).acquire(timeout=0)
    except Timeout as error:
        raise ValueError(refusal) from error
    with held:
        yield
