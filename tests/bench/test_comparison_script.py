"""The comparison at equal training time: made once, and whole."""

from pathlib import Path
from typing import Any

import pytest
from scripts import base_answers_and_prompts, commands_here, load_script


def test_methods_are_trained_once_and_measured_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script: Any = load_script("comparison")
    run = commands_here(script, monkeypatch)
    base, answers, prompts = base_answers_and_prompts(tmp_path)
    given = [
        "--model", str(base), "--answers", str(answers), "--prompts", str(prompts), "--limit", "2",
        "--max-new-tokens", "6", "--threads", "1", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    script.main([*given, "--methods", "medusa"])
    assert [words[0] for words in run] == ["train", "bench", "bench", "bench"]
    table = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert [line.split("`")[1] for line in table[2:]] == ["prompt_lookup", "medusa"]
    assert all(line.count("|") == 10 for line in table)
    assert table[2].endswith("-, -, -, - |") and "-," not in table[3]
    # Another method joins: only its adapter is trained.
    script.main([*given, "--methods", "medusa,bita"])
    assert [words[0] for words in run[4:]] == ["train", "bench", "bench", "bench"]
    script.main([*given, "--methods", "medusa,bita"])
    assert len(run) == 8
    with pytest.raises(SystemExit):
        script.main([*given, "--methods", "prompt_lookup"])
    assert "'prompt_lookup' is not trained" in capfd.readouterr().err
