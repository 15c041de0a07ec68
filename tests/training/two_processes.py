"""Run a training program in one process and, on half batches, in two."""

from __future__ import annotations

import json
import socket
import textwrap
from pathlib import Path
from typing import Any

import forks
import pytest

START = """
import sys, torch
from pathlib import Path
size, output = int(sys.argv[1]), Path(sys.argv[2])
"""


def run_both(program: str, tmp_path: Path) -> tuple[Path, Path]:
    """Run ``program``, which uses ``size`` rows per process and writes to ``output``.

    Returns:
        What one process of 4 rows wrote, and what two of 2 rows did (gloo).
    """
    code = START + textwrap.dedent(program)
    one, two = tmp_path / "one", tmp_path / "two"
    done = [forks.run(code, "4", str(one))]
    both = [forks.Program(code, "2", str(two), environment=each) for each in ranks(2)]
    done += [each.finish() for each in both]
    for each in done:
        assert each.returncode == 0, each.stderr
    return one, two


def ranks(size: int) -> list[dict[str, str]]:
    """What ``torchrun`` tells each of this many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    every = {
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }  # fmt: skip
    own = [{"RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    return [{key: str(value) for key, value in {**every, **one}.items()} for one in own]


def assert_same_history(
    one: Path, two: Path, rel: float, keys: tuple[str, ...] = ("loss", "eval_loss", "eval_tau")
) -> None:
    """Losses and served figures agree; sums in another order round differently in fp32."""
    histories: list[list[dict[str, Any]]] = [
        json.loads((folder / "training.json").read_text())["history"] for folder in (one, two)
    ]
    for key in keys:
        first, second = ([row[key] for row in history if key in row] for history in histories)
        assert len(first) > 1 and first == pytest.approx(second, rel=rel), key
