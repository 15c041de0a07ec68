"""The benchmark for GPUs, on the CPU: everything is measured and written, arguments are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

SMALL = [
    "--shape", "tiny", "--device", "cpu", "--backend", "eager", "--contexts", "24",
    "--batch-sizes", "2", "--tokens", "1,4", "--candidates", "5", "--repeats", "2", "--calls", "1",
    "--new-tokens", "16", "--strategies", "prompt_lookup,space,layer_skip",
]  # fmt: skip
WAYS = ("eager", "compiled")


@pytest.fixture(scope="module")
def cuda() -> Any:
    return load_script("cuda")


def test_everything_is_measured(cuda: Any, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "results.json"
    cuda.main([*SMALL, "--output", str(path)])
    results = json.loads(path.read_text())
    plain, forward, strategies = (results[kind] for kind in ("plain", "forward", "strategies"))

    assert [row["way"] for row in plain] == list(WAYS)
    assert [(row["way"], row["tokens"]) for row in forward] == [
        (way, tokens) for way in WAYS for tokens in (1, 4)
    ]
    names = ("prompt_lookup", "space", "layer_skip")
    assert [(row.get("strategy"), row.get("way")) for row in strategies] == [
        (name, way) for name in names for way in WAYS
    ]
    for row in [*plain, *forward, *strategies]:
        assert (row["shape"], row["context"], row["batch"]) == ("tiny", 24, 2)
        assert 0 < row["low_ms"] <= row["ms"] <= row["high_ms"] and row["first_seconds"] > 0
        assert row["refused"] == []
    for row in plain:
        assert row["later_ms"] > 0 and row["tokens_per_second"] > 0
        assert row["waits"] == "not on this device"
    for row in [*forward, *strategies]:
        assert row["ratio"] > 0
        assert row["made"] > 0 if row["way"] == "compiled" else row["made"] == 0
    for row in strategies:
        assert row["candidates"] == 5 and row["drafted"] > 0
        assert 0 < row["outside_share"] < 1
    assert results["skipped"] == []

    about = results["environment"]
    assert about["argv"][0] == "cuda.py" and about["dtype"] == "float32" and about["date"]
    assert about["device_name"] and about["torch"] and about["transformers"]
    shown = capsys.readouterr().out
    assert "outside" in shown and "waits for the device: not on this device" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "70b"], "--shape 70b: choose from tiny, 22m, 1b, 8b"),
        (["--contexts", "0"], "give numbers from 1 on"),
        (["--repeats", "1"], "--repeats must be at least 2"),
        (["--backend", "none"], "torch.compile does not know it"),
    ],
)
def test_bad_arguments(cuda: Any, arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cuda.main([*SMALL, *arguments])
    assert message in capsys.readouterr().err
