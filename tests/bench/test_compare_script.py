"""Paired comparisons of contenders, from results whose every figure is known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("compare")


def write(folder: Path, rows: dict[str, list[tuple[int, int, float]]]) -> Path:
    """Results with calls of these tokens, forwards and seconds, one per prompt."""
    calls = [
        {
            "strategy": name, "batch_size": 1, "prompts": [index], "new_tokens": tokens,
            "row_steps": steps, "seconds": seconds,
        }
        for name, own in rows.items()
        for index, (tokens, steps, seconds) in enumerate(own)
    ]  # fmt: skip
    runs = [
        {"strategy": name, "batch_size": 1, "baseline": f"generate{'@tuned' * ('@' in name)}"}
        for name in rows
    ]
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"runs": runs, "calls": calls}))
    return folder


def lengths(seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(20, 90, 16).tolist()
    return found


def test_figures_and_intervals(script: Any, tmp_path: Path) -> None:
    """Twice and three times as fast on every prompt, whose lengths differ: certain when paired."""
    tokens = lengths(0)
    first = write(
        tmp_path / "first",
        {
            "generate": [(n, n, 1.0 * n) for n in tokens],
            "a": [(n, n, 0.5 * n) for n in tokens],
            "b": [(2 * n, n, n / 1.5) for n in tokens],
        },
    )
    found = script.read([first])
    assert [one.name for one in found] == ["a", "b"]
    (difference, ends), (ratio, speeds) = script.beside(found[1], found[0])
    assert difference == 1.0 and ends == (1.0, 1.0)
    assert ratio == pytest.approx(1.5) and speeds == pytest.approx((1.5, 1.5))
    # Of other prompts by chance: the same on average, so the intervals hold 0 and 1.
    noisy = [0.5 * n * f for n, f in zip(tokens, np.linspace(0.8, 1.2, 16))]
    second = write(
        tmp_path / "second",
        {
            "generate": [(n, n, 2.0 * n) for n in tokens],
            "a": [(n, n, 2 * seconds) for n, seconds in zip(tokens, noisy)],
        },
    )
    both = script.read([first, second])
    assert [one.name for one in both] == ["first a", "first b", "second a"]
    (_, ends), (ratio, speeds) = script.beside(both[2], both[0])
    assert ends == (0.0, 0.0) and speeds[0] < 1 < speeds[1] and 0.9 < ratio < 1.1
    # Fine-tuned models have a baseline of their own.
    rows = {"generate": [(8, 8, 1.0)], "generate@tuned": [(8, 8, 2.0)], "a@tuned": [(8, 4, 1.0)]}
    (tuned,) = script.read([write(tmp_path / "tuned", rows)])
    assert tuned.name == "a@tuned" and script.speedup(*tuned.calls[0,]) == 2.0


def test_the_table(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = lengths(1)
    rows = {
        "generate": [(n, n, 1.0) for n in tokens],
        "a": [(n, n, 0.5) for n in tokens],
        "b": [(n, n / 2, 0.25) for n in tokens],
    }
    folder = write(tmp_path / "results", rows)  # type: ignore[arg-type]
    script.main([str(folder), "--against", "b"])
    out = " ".join(capsys.readouterr().out.split())
    assert "beside b" in out and "2.00x" in out and "4.00x" in out and "-1.00" in out


def test_what_cannot_be_compared(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "one", {"generate": [(3, 3, 1.0)], "a": [(3, 3, 1.0)]})
    with pytest.raises(SystemExit):
        script.main([str(one), "--against", "c"])
    assert "--against c: there is no such contender, only a" in capsys.readouterr().err
    none = write(tmp_path / "none", {"a": [(3, 3, 1.0)]})
    with pytest.raises(ValueError, match="has no 'generate' of the same prompts"):
        script.read([none])
    for folder in (none, tmp_path / "nowhere"):
        with pytest.raises(SystemExit):
            script.main([str(folder)])
        assert str(folder) in capsys.readouterr().err
    few = script.read([one])[0]
    assert script.beside(few, few)[0] == [0.0, None]
    other = script.Measured("other", 1, {(7,): (1, 1, 1.0, 1, 1, 1.0)})
    with pytest.raises(ValueError, match="'a' and 'other' have answered different prompts"):
        script.beside(few, other)
