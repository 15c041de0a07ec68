"""``benchmarks/gpu.py``: a dry run of every part; rows that cannot be measured are given up."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from replay import Replay
from scripts import load_script

#: Prints messages and does then what a process may do.
PROCESS = """
import json, sys, time
cells = json.load(sys.stdin)
print("a line of some library")
print(json.dumps({"environment": {}}), flush=True)
print(json.dumps({"begins": cells[0]}), flush=True)
print(json.dumps({"found": {"ms": 1.0}}), flush=True)
print(json.dumps({"begins": cells[1]}), flush=True)
"""


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.environment)])
def test_every_part_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], every: bool
) -> None:
    """On a CPU, without a model; what has been measured is not measured again. A run takes an eager
    row of each contender, and one whose steps are recorded."""
    gpu: Any = load_script("gpu")
    monkeypatch.setattr(gpu, "TOKENS", (1, 4))
    words = [
        "--model", "random", "--contexts", "40,60", "--batches", "1,2", "--new-tokens", "8",
        "--prompts", "1", "--device", "cpu", "--dtype", "float32", "--here",
        "--output", str(tmp_path / "gpu.json"),
    ]  # fmt: skip
    whole = gpu.plan(gpu.parse(words))
    assert whole[0] == gpu.Cell("transformers", context=40) and len({*whole}) == len(whole) > 30
    if not every:
        firsts = {(one.what, one.contender): one._replace(way="eager") for one in reversed(whole)}
        few = [*reversed(firsts.values()), next(one for one in whole if one.way != "eager")]
        monkeypatch.setattr(gpu, "plan", lambda args: few)
    gpu.main(words)
    results = json.loads((tmp_path / "gpu.json").read_text())
    cells = [gpu.Cell(*row["cell"]) for row in results["rows"]]
    assert cells == gpu.plan(gpu.parse(words))
    for cell, row in zip(cells, results["rows"]):
        assert "error" not in row and not row.get("refused"), row
        if cell.what == "speed":
            stock = cell.contender.startswith("transformers")
            assert (
                row["synthetic"] == (not stock and cell.contender != "plain")
                and row["tokens_per_second"] > 0
            )
            assert (row["made"] > 0) == (cell.way != "eager"), row
    text = capsys.readouterr().out
    assert "1.00x" in text and "eagle3*" in text and "rows are left" not in text
    monkeypatch.setattr(gpu, "messages", None)
    gpu.main(words)
    assert "eagle3*" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is of other options"):
        gpu.main([*words, "--rates", "0.5"])


#: Arguments of a run on a CPU that is quick.
SMALL = [
    "--model", "random", "--contexts", "40", "--batches", "1", "--new-tokens", "8", "--prompts",
    "1", "--device", "cpu", "--dtype", "float32", "--here",
]  # fmt: skip


def test_the_run_that_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where CUDA graphs are emulated, what needs no CUDA is checked; without CUDA nothing is
    decided."""
    gpu: Any = load_script("gpu")
    checks: Any = sys.modules["gpu_checks"]
    words = [*SMALL, "--decide", "--output", str(tmp_path / "decide.json")]
    args = gpu.parse(words)
    assert args.minutes < 10 and gpu.parse(SMALL).minutes < 8
    cells = gpu.plan(args)
    assert {one.contender for one in cells if one.what == "check"} == {*checks.CHECKS}
    monkeypatch.setattr(gpu, "plan", lambda _: [one for one in cells if one.what == "check"])
    monkeypatch.setitem(checks.RECORDERS, "cpu", Replay)
    monkeypatch.setattr(checks, "CALLS", 2)
    monkeypatch.setattr(checks, "LONG", 1)
    gpu.main(words)
    written = json.loads((tmp_path / "decide.json").read_text())
    rows = {row["cell"][0]: row for row in written["rows"]}
    assert {name for name, row in rows.items() if "skipped" in row} == {*checks.ON_CUDA}
    assert not [row for row in rows.values() if "error" in row]
    assert rows["an interrupt"]["runs"] and "recorded" in rows["experts"]["float32"]
    assert rows["the default"]["eager_s"] > 0
    said = capsys.readouterr().out
    assert "NO   a failed capture: needs CUDA" in said and "yes  an interrupt: as it should" in said
    assert "RECORD_BY_DEFAULT stays False" in said


def decided(**changes: dict[str, Any]) -> tuple[bool, Any]:
    """Whether all conditions hold, and those that do not, of good results with some changes."""
    gpu: Any = load_script("gpu")
    checks: Any = sys.modules["gpu_checks"]
    rows: dict[Any, Any] = {one: {"tokens_per_second": 100.0} for one in checks.decisive()}
    for one, row in rows.items():
        row |= {"the tests": {"failed": 0, "passed": 400}}.get(one.contender, {})
        row |= {"the default": {"longest_ratio": 1.05, "runs": 40}}.get(one.contender, {})
        if one.contender == "medusa" and one.way == "recorded":
            row |= {"ms": 7.2, "first_call_s": 3.9, "tokens_per_second": 180.0}
        row |= changes.get(f"{one.contender} {one.way}".replace(" eager", ""), {})
    wrong = [said for holds, said in checks.verdict([*rows.items()]) if not holds]
    assert gpu.print_verdict([*rows.items()]) == (not wrong)
    return not wrong, wrong


def test_what_is_decided(capsys: pytest.CaptureFixture[str]) -> None:
    """All conditions must hold; the last line says what to do."""
    assert decided() == (True, [])
    assert "set RECORD_BY_DEFAULT = True" in capsys.readouterr().out
    for changes, why in (
        ({"many streams": {"error": "others' memory was written"}}, "others' memory was written"),
        ({"the tests": {"failed": 2, "names": ["a", "b"]}}, "tests that fail: 2"),
        ({"the default": {"longest_ratio": 1.2}}, "1.20 times"),
        ({"the default": {"runs": 0}}, "last call by default: 0"),
        ({"medusa recorded": {"ms": 7.9}}, "7.90 of 7.5 ms"),
        ({"medusa recorded": {"first_call_s": 6.0}}, "6.0 of 4.0 s"),
        ({"medusa recorded": {"tokens_per_second": 110.0}}, "1.10 times as fast"),
        ({"medusa recorded": {"error": "took too long", "ms": None}}, "took too long"),
    ):
        holds, wrong = decided(**changes)
        assert not holds and any(why in said for said in wrong), (why, wrong)
    assert "RECORD_BY_DEFAULT stays False" in capsys.readouterr().out


def measured(
    gpu: Any, folder: Path, program: str, names: str, minutes: str = "1"
) -> tuple[Any, list[int]]:
    """Results of cells that another process measures, and how many each of its starts had left."""
    args, begun = gpu.parse(["--output", str(folder / "gpu.json"), "--minutes", minutes]), []

    def source(left: Any, ends: float) -> Any:
        begun.append(len(left))
        return gpu.in_another_process([sys.executable, "-c", program], left, ends)

    return gpu.measure(args, [gpu.Cell(name) for name in names], source), begun


@pytest.mark.parametrize(
    ("then", "error"),
    [
        ("time.sleep(60)", "took longer than 1 seconds"), ("sys.exit(7)", "ended with 7"),
        ("print(json.dumps({'found': {'ms': 2.0}}))", None),
        ("print(json.dumps({'found': {'ms': 2.0}}), flush=True); sys.exit(7)", None),
    ],
)  # fmt: skip
def test_a_row_that_hangs_or_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, error: str | None
) -> None:
    """It is given up, and the next process goes on behind it."""
    gpu: Any = load_script("gpu")
    monkeypatch.setattr(gpu, "limit_of", lambda cell: 1.0)
    results, begun = measured(gpu, tmp_path, PROCESS + then, "abcd")
    assert begun == [4, 2] and results["left"] == 0
    found = [row.get("error") for row in results["rows"]]
    assert found[::2] == [None, None]
    assert all(error in one if error else one is None for one in found[1::2])
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"][0]["ms"] == 1.0


def test_the_time_is_kept(tmp_path: Path) -> None:
    """What is not done then has no row, so that the same command goes on with it."""
    start, program = time.monotonic(), PROCESS + "time.sleep(60)"
    results, _ = measured(load_script("gpu"), tmp_path, program, "ab", minutes="0.05")
    assert time.monotonic() - start < 20 and results["left"] == 2 - len(results["rows"]) >= 1


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot measure: its process ended with 1"):
        measured(load_script("gpu"), tmp_path, "import sys; sys.exit(1)", "a")
