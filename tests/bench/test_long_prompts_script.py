"""Prompts of the repository's own text, for benchmarks of long contexts."""

import json
from pathlib import Path

import pytest
import torch
from scripts import load_script
from tiny_checkpoint import save_checkpoint
from transformers import AutoTokenizer

import hf_spec
from hf_spec.tools.bench.prompts import read_prompts


def test_prompts_of_a_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same each time, no longer than asked for, and both of a kind with different questions."""
    folder = str(save_checkpoint(tmp_path / "model"))
    words = ["long_prompts.py", "--model", folder, "--lengths", "2048", "4096", "--count", "2"]
    for name in ("one", "two"):
        monkeypatch.setattr("sys.argv", [*words, "-o", str(tmp_path / name)])
        load_script("long_prompts").main()
    assert "8 prompts" in capsys.readouterr().out
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    prompts = read_prompts(tmp_path / "one")
    kinds = [f"{size} {kind}" for kind in ("docs", "code") for size in ("2k", "4k")]
    assert [one.category for one in prompts] == [kind for kind in kinds for _ in range(2)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for one in prompts:
        size = int(one.category[0]) * 1024
        assert 0.8 * size < len(tokenizer(one.text)["input_ids"]) <= size
    questions = [one.text.splitlines()[-1] for one in prompts]
    assert all(first != second for first, second in zip(questions[::2], questions[1::2]))
    for lengths in ("100", "100000000"):
        monkeypatch.setattr("sys.argv", [*words[:3], "--lengths", lengths, "-o", "none"])
        with pytest.raises(SystemExit):
            load_script("long_prompts").main()
        assert "give numbers from 129 to" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="in bfloat16 outputs differ")
def test_steps_at_a_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A widened model with a widened adapter, and with one of random weights, says the same."""
    demo, found = Path(hf_spec.__file__).parent / "tools" / "demo", tmp_path / "found.json"
    load_script("contexts").main([
        "--model", str(demo / "model"), "--adapter", str(demo / "adapters" / "medusa"),
        "--shape", "double", "--contexts", "200", "--contenders", "transformers,medusa,eagle3",
        "--rounds", "1", "--new-tokens", "12", "--output", str(found),
    ])  # fmt: skip
    rows = json.loads(found.read_text())
    assert [row["contender"] for row in rows] == ["transformers", "medusa", "eagle3"]
    assert all(row["same"] and row["ms"] > 0 for row in rows) and "1.00x" in capsys.readouterr().out
