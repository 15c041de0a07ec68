"""The benchmark for GPUs, on the CPU: everything is measured and written, arguments are checked."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

from hf_spec.methods.registry import methods

COMMON = [
    "--shape", "tiny", "--device", "cpu", "--backend", "eager", "--contexts", "24",
    "--batch-sizes", "2", "--candidates", "5", "--repeats", "2", "--calls", "1",
    "--new-tokens", "16",
]  # fmt: skip
WAYS = ("uncompiled", "eager")


@pytest.fixture(scope="module")
def cuda() -> Any:
    return load_script("cuda")


@pytest.mark.usefixtures("sizes_as_shipped")  # each number of tokens has code of its own
@pytest.mark.parametrize(
    ("layers", "lengths", "names"),
    [
        (1, (4,), ("space",)),  # compiling takes most of the time
        pytest.param(4, (1, 4), (*methods(),), marks=pytest.mark.environment),
    ],
)
def test_everything_is_measured(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any,
    layers: int, lengths: tuple[int, ...], names: tuple[str, ...],
) -> None:  # fmt: skip
    monkeypatch.setitem(cuda.SHAPES, "tiny", (32, layers, 2, 1, 64, 64))
    path = tmp_path / "results.json"
    tokens = ",".join(map(str, lengths))
    chosen = ["--tokens", tokens, "--strategies", ",".join(names), "--output", str(path)]
    cuda.main([*COMMON, *chosen])
    results = json.loads(path.read_text())
    plain, forward, strategies = (results[kind] for kind in ("generate", "forward", "strategies"))

    assert [row["way"] for row in plain] == list(WAYS)
    assert [(row["way"], row["tokens"]) for row in forward] == [*product(WAYS, lengths)]
    assert [(row.get("strategy"), row.get("way")) for row in strategies] == [*product(names, WAYS)]
    for row in [*plain, *forward, *strategies]:
        assert (row["shape"], row["context"], row["batch"]) == ("tiny", 24, 2)
        assert 0 < row["low_ms"] <= row["ms"] <= row["high_ms"] and row["first_seconds"] > 0
        assert row["refused"] == []
    for row in plain:
        assert row["later_ms"] > 0 and row["tokens_per_second"] > 0
        assert row["waits"] == "not on this device"
    for row in [*forward, *strategies]:
        assert row["ratio"] > 0
        assert (row["made"] > 0) == (row["way"] == "eager")
    for row in strategies:
        assert row["candidates"] == 5
        assert (row["drafted"] > 0) == (row["strategy"] != "plain")
        assert 0 < row["outside_share"] < 1
    assert results["skipped"] == []

    about = results["environment"]
    assert about["argv"][0] == "cuda.py" and about["dtype"] == "float32" and about["date"]
    assert about["device_name"] and about["torch"] and about["transformers"]
    shown = capsys.readouterr().out
    assert "outside" in shown and "waits for the device: not on this device" in shown


def test_every_strategy_runs(cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with random weights of its own; compiled calls, which take time, are left out."""
    monkeypatch.setitem(cuda.SHAPES, "tiny", (32, 4, 2, 1, 64, 64))
    both = cuda.Bench.strategy
    monkeypatch.setattr(cuda.Bench, "plain", lambda self: dict.fromkeys(WAYS, self._plain))
    monkeypatch.setattr(
        cuda.Bench, "strategy", lambda self, *given: {WAYS[0]: both(self, *given)[WAYS[0]]}
    )
    monkeypatch.setattr(cuda.Bench, "forwards", lambda self: iter(()))
    path = tmp_path / "results.json"
    cuda.main([*COMMON, "--output", str(path)])
    rows = json.loads(path.read_text())["strategies"]
    assert [row["strategy"] for row in rows] == [*methods()]
    for row in rows:
        assert "error" not in row and (row["drafted"] > 0) == (row["strategy"] != "plain"), row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "70b"], "--shape 70b: choose from tiny, 22m, 1b, 8b"),
        (["--contexts", "0"], "must be numbers from 1"),
        (["--repeats", "1"], "--repeats must be at least 2"),
        (["--backend", "none"], "torch.compile does not know it"),
    ],
)
def test_bad_arguments(cuda: Any, arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cuda.main([*COMMON, *arguments])
    assert message in capsys.readouterr().err
