"""The plot of the adaptive threshold while decoding."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from peft import get_peft_model
from scripts import load_script
from tiny_checkpoint import make_model, save_checkpoint, write_prompts

import hf_spec


def test_the_threshold_moves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file starts anew; every stage moves it by (1 - 0.9) x 0.01."""
    model = save_checkpoint(tmp_path / "model")
    adapter = get_peft_model(make_model(), hf_spec.LayerSkipConfig(skip_attention=[1]))
    adapter.save_pretrained(tmp_path / "skip")
    for name in ("one", "two"):
        write_prompts(tmp_path / f"{name}.jsonl", [{"prompt": "ab ab"}] * 9)
    output = tmp_path / "threshold.svg"
    load_script("threshold").main(
        ["--model", str(model), "--adapter", str(tmp_path / "skip"), "--stages", "30", "--output",
         str(output), "--dtype", "float32", "--max-new-tokens", "20", "--first", "0.5",
         "--prompts", str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    )  # fmt: skip
    printed = capsys.readouterr().out
    lines = {
        name: [row.removeprefix(name) for row in printed.splitlines() if row.startswith(name)]
        for name in ("one", "two")
    }
    assert lines["one"] == lines["two"]  # the same prompts, and nothing carried over
    found = [re.findall(r"[0-9.]+", row) for row in lines["one"][:-1]]
    stages, values = [int(row[0]) for row in found], [float(row[1]) for row in found]
    assert stages[0] == 0 and values[0] == 0.5 and stages[-1] >= 30
    assert len(set(values)) > 1
    for before, after in pairwise(zip(stages, values)):
        assert abs(after[1] - before[1]) <= (after[0] - before[0]) * 0.001 + 0.01  # as printed
    assert "drafting stages" in output.read_text(encoding="utf-8")
