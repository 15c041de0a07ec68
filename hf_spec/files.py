"""Files are written in one step, so that whoever reads one sees the old content or the new; JSON
files are read with errors that name them."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: What the system says where there is no room for what is written.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: Levels of JSON that are read; files of configs and records have about ten.
MOST_LEVELS = 64


class NoRoom(OSError):
    """There is no room for what is written; the message names the folder."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise :class:`NoRoom` where there is no room for what the block writes into ``folder``.

    The system's error does not say where, libraries raise errors of their own, or fail behind it.
    """
    try:
        yield
    except NoRoom:
        raise
    except Exception as error:
        one: BaseException | None = error
        while one is not None:
            if (reason := _no_room(one)) is not None:
                raise NoRoom(
                    f"cannot write to {str(folder)!r}: {reason}; make room there, or choose "
                    "another folder"
                ) from error
            one = one.__cause__ or one.__context__
        raise


def _no_room(error: BaseException) -> str | None:
    """Why there was no room, if that is what the error says."""
    from safetensors import SafetensorError

    text = str(error)
    if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
        return error.strerror
    if isinstance(error, SafetensorError) and "while serializing" in text:
        return text.splitlines()[0]
    if isinstance(error, sqlite3.OperationalError) and "is full" in text:
        return text
    if isinstance(error, RuntimeError) and "inline_container" in text:
        return "a file could not be written to its end"  # torch.save does not say why
    return None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path`` that takes its place if the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with writing(path.parent):
            yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Give a temporary folder, whose files and subfolders move to ``folder`` after the block,
    unless it raises."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder, prefix=".writing-", ignore_cleanup_errors=True
    ) as name:
        temporary = Path(name)
        with writing(folder):
            yield temporary
        umask = os.umask(0)
        os.umask(umask)
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                target = folder / path.relative_to(temporary)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.chmod(path, 0o666 & ~umask)  # some libraries write private files
                os.replace(path, target)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file, with one line break at its end, in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def write_json(path: Path, data: Any, indent: int = 1) -> None:
    """Write JSON as :func:`write_atomically` writes text."""
    write_atomically(path, json.dumps(data, indent=indent))


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
    if _is_deep(data):
        raise ValueError(f"{str(path)!r} is nested more than {MOST_LEVELS} levels deep")
    return data


def _is_deep(data: Any) -> bool:
    """Whether what JSON holds is nested deeper than code that walks it can be."""
    level = [data]
    for _ in range(MOST_LEVELS):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for one in inner for part in one if isinstance(part, (dict, list))]
    return bool(level)


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


def is_path(name: str) -> bool:
    """Whether a model's name cannot be a repository on the Hub, ``name`` or ``owner/name``."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1
