"""Steps at long contexts, measured with a widened model."""

import json
from pathlib import Path

import pytest
import torch
from scripts import load_script

import hf_spec


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
