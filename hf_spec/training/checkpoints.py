"""Finds the checkpoint to resume a training from. Knows files only.

The Trainer writes a checkpoint file by file, and may be killed while it does.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from pathlib import Path

logger = logging.getLogger(__name__)

#: File that the Trainer writes last.
STATE = "trainer_state.json"


def checkpoints(folder: Path) -> list[Path]:
    """The Trainer's checkpoints in a folder, complete or not, the latest first."""
    found = {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if path.is_dir() and (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    return [found[step] for step in sorted(found, reverse=True)]


def last_whole(folder: Path) -> Path | None:
    """The latest complete checkpoint; None if there is none.

    Later, incomplete ones are logged and left alone: training overwrites them when it gets there.
    """
    for path in checkpoints(folder):
        broken = _broken_file(path)
        if broken is None:
            return path
        logger.warning(
            "%s was not written to its end (%s): training goes on from an earlier one.",
            path, broken,
        )  # fmt: skip
    return None


def _broken_file(checkpoint: Path) -> str | None:
    """The file that is missing or truncated, for the log; None if the checkpoint is complete."""
    if not (checkpoint / STATE).is_file():
        return f"no {STATE}"
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint)
        # Hidden names are temporary; such files are renamed when they are complete.
        unfinished = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not unfinished and not _is_whole(path):
            return str(name)
    return None


def _is_whole(path: Path) -> bool:
    """Whether a file is complete, as far as its format tells without reading all of it."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                return True
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    except (SafetensorError, ValueError):
        return False
    # Files of torch.save are archives, with their directory at the end.
    return path.suffix not in (".pt", ".pth", ".bin") or zipfile.is_zipfile(path)
