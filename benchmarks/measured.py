"""Commands of hf-spec whose results are kept: what is there is not measured again."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from hf_spec.files import read_json, write_atomically

#: What was measured, beside ``results.json``: the arguments of ``hf-spec bench``.
ARGUMENTS = "arguments.json"


def command(*words: str) -> None:
    """Run a command of hf-spec.

    Raises:
        SystemExit: it failed.
    """
    print("hf-spec", shlex.join(words), flush=True)
    done = subprocess.run([sys.executable, "-m", "hf_spec.tools.cli", *words], capture_output=True)
    if done.returncode:
        raise SystemExit(f"hf-spec {words[0]} failed:\n{done.stderr.decode()[-2000:]}")


def is_measured(folder: Path, words: list[str]) -> bool:
    """Whether a folder has whole results of these arguments."""
    results, known = folder / "results.json", folder / ARGUMENTS
    if not (results.is_file() and known.is_file()):
        return False
    return (
        read_json(known)["bench"] == words and not read_json(results)["environment"]["interrupted"]
    )


def bench(folder: Path, words: list[str]) -> dict[str, Any]:
    """What ``hf-spec bench`` with these arguments writes into a folder, unless it is there.

    Raises:
        SystemExit: it failed.
    """
    if not is_measured(folder, words):
        (folder / ARGUMENTS).unlink(missing_ok=True)
        command("bench", *words, "--output", str(folder))
        write_atomically(folder / ARGUMENTS, json.dumps({"bench": words}))
    results: dict[str, Any] = read_json(folder / "results.json")
    return results
