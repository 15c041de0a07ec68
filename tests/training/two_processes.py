"""Run a training program in one process and, on half batches, in two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

START = """
    import sys
    sys.path[:0] = {paths!r}
    import torch
    torch.set_num_threads(1)
    from pathlib import Path
    size, output = int(sys.argv[1]), Path(sys.argv[2])
"""


def run_both(program: str, tmp_path: Path) -> tuple[Path, Path]:
    """Run ``program``, which uses ``size`` rows per process and writes to ``output``.

    Returns:
        What one process of 4 rows wrote, and what two of 2 rows did (gloo).
    """
    start = START.format(paths=[str(Path(__file__).parent), str(Path(__file__).parents[1])])
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(start) + textwrap.dedent(program))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    one, two = tmp_path / "one", tmp_path / "two"
    alone = [sys.executable, str(script), "4", str(one)]
    both = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
        "--standalone", str(script), "2", str(two),
    ]  # fmt: skip
    for command in (alone, both):
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert run.returncode == 0, run.stderr
    return one, two


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
