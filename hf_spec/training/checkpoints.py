"""Which checkpoint a training can go on from. Knows files only.

The Trainer writes a checkpoint file by file, and may be killed meanwhile.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from pathlib import Path

logger = logging.getLogger(__name__)

#: What the Trainer writes last.
STATE = "trainer_state.json"


def checkpoints(folder: Path) -> list[Path]:
    """The Trainer's checkpoints in a folder, whole or not, that of the most steps first."""
    found = {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if path.is_dir() and (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    return [found[step] for step in sorted(found, reverse=True)]


def last_whole(folder: Path) -> Path | None:
    """The checkpoint of the most steps that was written to its end; None if there is none.

    Later ones are logged and stay as they are: training writes them anew when it gets there.
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
    """A file that is missing or cut off; None if all are whole."""
    if not (checkpoint / STATE).is_file():
        return f"no {STATE}"
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint)
        # Such files are put in place when they are whole.
        unfinished = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not unfinished and not _is_whole(path):
            return str(name)
    return None


def _is_whole(path: Path) -> bool:
    """Whether a file can be read to its end, as far as its kind tells without reading it all."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                return True
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    except (SafetensorError, ValueError):
        return False
    # Files of torch.save are archives, whose directory stands at their end.
    return path.suffix not in (".pt", ".pth", ".bin") or zipfile.is_zipfile(path)
