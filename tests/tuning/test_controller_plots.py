"""``hf-spec plot controller``, from a real benchmark's ``results.json`` and from others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from tiny_checkpoint import save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM

import hf_spec
from hf_spec import cli
from hf_spec.tuning.controller_plots import read_decisions


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a benchmark with online trees, static ones, and plain decoding."""
    root = tmp_path_factory.mktemp("decisions")
    save_checkpoint(root / "m")
    write_prompts(root / "p.jsonl", [{"prompt": text} for text in ("abab" * 4, "xyz xyz xyz")])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(root / "m", dtype=torch.float32)
    get_peft_model(model, hf_spec.MedusaConfig(num_heads=2)).save_pretrained(root / "medusa")
    (root / "medusa" / "README.md").unlink()  # PEFT's general one
    code = cli.main(
        [
            "bench", "--model", str(root / "m"), "--adapter", str(root / "medusa"),
            "--prompts", str(root / "p.jsonl"), "--dtype", "float32", "--device", "cpu",
            "--strategies", "medusa,medusa:online", "--max-new-tokens", "40",
            "--strategy-kwargs", 'medusa:online={"tree": "online", "fallback": true}',
            "--strategy-kwargs", 'medusa={"fallback": true}', "--output", str(root / "out"),
        ]
    )  # fmt: skip
    assert code == 0
    return root / "out"


def plot(source: Path, image: Path) -> int:
    return cli.main(["plot", "controller", str(source), "-o", str(image)])


def test_both_kinds_of_decisions_are_drawn(results: Path, tmp_path: Path) -> None:
    from matplotlib import image

    runs = read_decisions(results)
    assert [run["strategy"] for run in runs] == ["medusa", "medusa:online"]
    online = runs[1]["stats"]["details"]["online"]
    assert {"b0", "b1", "hits", "history", "median_error", "predicted_speed"} <= online.keys()
    assert plot(results, tmp_path / "new" / "all.png") == 0
    assert plot(results / "results.json", tmp_path / "file.png") == 0
    picture = image.imread(tmp_path / "new" / "all.png")
    assert picture.shape == image.imread(tmp_path / "file.png").shape
    assert 0.5 < picture[..., :3].mean() < 0.99  # something is drawn

    data = json.loads((results / "results.json").read_text())
    for run in data["runs"]:
        run["stats"].get("details", {}).pop("online", None)
    (tmp_path / "results.json").write_text(json.dumps(data))
    assert plot(tmp_path, tmp_path / "few.png") == 0
    assert image.imread(tmp_path / "few.png").shape[0] < picture.shape[0]


def test_the_start_of_a_call_can_be_drawn(results: Path, tmp_path: Path) -> None:
    """Where nothing was known yet."""
    data = json.loads((results / "results.json").read_text())
    details = data["runs"][-1]["stats"]["details"]["online"]
    details.update(b0=None, b1=None, seconds={}, history=[], median_error=None)
    (tmp_path / "results.json").write_text(json.dumps(data))
    assert plot(tmp_path, tmp_path / "start.png") == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "run hf-spec bench"),
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "is no result of hf-spec bench"),
        ({"runs": [{"task": "all", "stats": {}}]}, "has no run with decisions"),
    ],
)
def test_what_cannot_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, message: str
) -> None:
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "results.json").write_text(text)
    assert plot(tmp_path, tmp_path / "x.png") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
