"""The comparison at equal training time: made once, and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripts import load_script
from tiny_checkpoint import save_checkpoint, write_prompts

from hf_spec import cli


def test_methods_are_trained_once_and_measured_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script: Any = load_script("comparison")
    run: list[str] = []

    def in_this_process(*words: str) -> None:
        run.append(words[0])
        more = ["--max-steps", "2", "--dtype", "float32"] if words[0] == "train" else []
        assert cli.main([*words, *more]) == 0

    monkeypatch.setattr(script.measured, "command", in_this_process)
    base = save_checkpoint(tmp_path / "base")
    rows = [{"prompt": f"{n} and {n + 1}", "answer": f"{2 * n + 1} is it"} for n in range(40)]
    answers = write_prompts(tmp_path / "answers.jsonl", rows)
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": row["prompt"]} for row in rows])
    given = [
        "--model", str(base), "--answers", str(answers), "--prompts", str(prompts), "--limit", "2",
        "--max-new-tokens", "6", "--threads", "1", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    script.main([*given, "--methods", "medusa"])
    assert run == ["train", "bench", "bench", "bench"]
    table = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert [line.split("`")[1] for line in table[2:]] == ["prompt_lookup", "medusa"]
    assert all(line.count("|") == 10 for line in table)
    assert table[2].endswith("-, -, -, - |") and "-," not in table[3]
    # Another method joins: only its adapter is trained.
    script.main([*given, "--methods", "medusa,bita"])
    assert run[4:] == ["train", "bench", "bench", "bench"]
    script.main([*given, "--methods", "medusa,bita"])
    assert len(run) == 8
    with pytest.raises(SystemExit):
        script.main([*given, "--methods", "prompt_lookup"])
    assert "'prompt_lookup' is not trained" in capfd.readouterr().err
