"""What the samplers of the layer search find in equally many trials."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import load_script
from tiny_checkpoint import save_checkpoint

pytest.importorskip("optuna")
pytest.importorskip("scipy")

from hf_spec.tools.bench.session import Session
from hf_spec.tools.search.layers import SAMPLERS


def test_a_row_for_each_sampler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a model of the time: the same again, whatever the machine does."""
    arguments = SimpleNamespace(
        model=str(save_checkpoint(tmp_path)), dtype="float32", trials=3, seeds=[0], limit=1,
        samplers=list(SAMPLERS),
    )  # fmt: skip
    original, tables = Session.generate, []
    for _ in range(2):
        load_script("search_samplers").main(arguments)
        rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
        tables.append([row[:-1] for row in rows])
    assert Session.generate is original
    assert tables[0] == tables[1]
    title, *rows = tables[0]
    assert title == ["sampler, seed", "1 trials", "2 trials", "3 trials", "others"]
    assert [row[0] for row in rows] == ["gp, 0", "tpe, 0"]
    for row in rows:
        speeds = [float(one.rstrip("x")) for one in row[1:]]
        assert speeds[:3] == sorted(speeds[:3]) and min(speeds) > 0
