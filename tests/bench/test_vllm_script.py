"""The comparison with vLLM, with a stand-in for the interpreter that has vLLM."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import load_script
from tiny_checkpoint import save_checkpoint

#: Answers with the model's own greedy tokens, which it reads from a file, the last one cut off
#: where n-grams speculate.
ANSWERS = """
import json, pathlib, sys
asked = json.load(sys.stdin)
assert asked["dtype"] == "float32" and asked["max_new_tokens"] == 6
known = json.loads(pathlib.Path({known!r}).read_text())
tokens = [known[str(ids)] for ids in asked["prompts"]]
assert asked["max_model_len"] > max(map(len, asked["prompts"])) + 6 + 5
speculative = asked["speculative"] or {{}}
if speculative.get("method") == "ngram":
    tokens[-1] = tokens[-1][:-1]
elif speculative.get("method") == "suffix":
    sys.exit("ImportError: Arctic Inference is required for suffix decoding.")
elif speculative:
    assert pathlib.Path(speculative["model"]).is_dir() and speculative["method"] == "eagle3"
    assert speculative["parallel_drafting"] and speculative["num_speculative_tokens"] == 5
    tokens = tokens[::-1]
together = asked["batch_size"] > 1
# Nothing that is measured is answered before.
assert not any(ids in asked["prompts"] for ids in asked["warm"])
assert len(asked["warm"]) == min(asked["batch_size"], len(tokens))
print("what vLLM says")
seconds = [0.1] if together else [0.1] * len(tokens)
print(json.dumps(dict(version="9.9", torch="1.0", seconds=seconds, tokens=tokens)))
"""


@pytest.fixture(scope="module")
def vllm() -> Any:
    return load_script("vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    save_checkpoint(folder / "model", layers=1)
    rows = [{"prompt": text} for text in ("abcabcabc", "hello hello")]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def stand_in(folder: Path, source: str) -> str:
    """An interpreter that runs this whatever it is asked to run."""
    (folder / "answers.py").write_text(source)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "answers.py"}"\n')
    script.chmod(0o755)
    return str(script)


def arguments(folder: Path, python: str, *more: str) -> list[str]:
    return [
        "--vllm-python", python, "--model", str(folder / "model"), "--threads", "1",
        "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "6", "--repeats", "2",
        "--strategies", "prompt_lookup", "--backend", "eager", *more,
    ]  # fmt: skip


def known_answers(vllm: Any, folder: Path, tmp_path: Path) -> str:
    """The stand-in's source."""
    model, tokenizer = vllm.load_model(str(folder / "model"), "float32", "cpu")
    prompts = vllm.read_prompts(folder / "prompts.jsonl")
    known = {}
    for ids in vllm.encode_prompts(model, tokenizer, prompts, 6)[0]:
        row = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0]
        known[str(ids)] = row[len(ids) :].tolist()
    (tmp_path / "known.json").write_text(json.dumps(known))
    return ANSWERS.format(known=str(tmp_path / "known.json"))


def test_everything_is_measured(vllm: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    python = stand_in(tmp_path, known_answers(vllm, folder, tmp_path))
    path = tmp_path / "results.json"
    vllm.main(arguments(folder, python, "--json", str(path)))
    found = json.loads(path.read_text())
    rows = {row["name"]: row for row in found["results"]}
    assert list(rows) == [
        "vLLM", "vLLM, n-gram", "generate", "generate+compiled", "prompt_lookup",
        "prompt_lookup+compiled",
    ]  # fmt: skip
    for name, row in rows.items():
        assert 0 < row["lowest"] <= row["tokens_per_second"] <= row["highest"]
        same = 0.5 if name == "vLLM, n-gram" else 1.0
        assert row["same_as_vllm"] == row["same_as_plain"] == same
    assert rows["vLLM"]["tokens_per_second"] == pytest.approx(12 / 0.2)
    about = found["environment"]
    assert about["vllm"] == "9.9" and about["vllm_torch"] == "1.0" and found["repeats"] == 2
    shown = capsys.readouterr().out
    assert "| vLLM, n-gram | 55.0 (55.0, 55.0) | 50% | 50% |" in shown and "vLLM 9.9" in shown


def test_engines_alone(vllm: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    python = stand_in(tmp_path, known_answers(vllm, folder, tmp_path))
    path, more = tmp_path / "results.json", ["--engines-only", "--batch-size", "2"]
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps({"speculators_model_type": "peagle"}))
    engines = ["--vllm", "drafter,plain", "--drafter", str(drafter)]
    vllm.main(arguments(folder, python, *more, *engines, "--json", str(path)))
    rows = {row["name"]: row for row in json.loads(path.read_text())["results"]}
    assert list(rows) == ["vLLM, drafter", "vLLM"]
    for name, row in rows.items():
        assert row["same_as_vllm"] == (0.0 if "drafter" in name else 1.0)
        assert "same_as_plain" not in row
        assert row["tokens_per_second"] == pytest.approx(12 / 0.1)
    shown = capsys.readouterr().out
    assert "2 prompts, 2 at a time" in shown
    assert "| | tokens per second | as vLLM answers |\n| --- | --- | --- |\n| vLLM, dr" in shown
    with pytest.raises(SystemExit, match="suffix decoding: .*\n.*Arctic Inference is required"):
        vllm.main(arguments(folder, python, *more, "--vllm", "suffix"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategies", "medusas"], "strategy='medusas'"),
        (["--vllm", "plain,eagle"], "--vllm plain,eagle: name each of plain,ngram,suffix,drafter"),
        (["--vllm", "drafter"], "--vllm drafter and --drafter FOLDER belong together"),
        (["--vllm", "drafter", "--drafter", "none"], "--drafter none: there is no config.json"),
        (["--batch-size", "8"], "--batch-size 8 needs --engines-only"),
    ],
)
def test_bad_arguments(vllm: Any, folder: Path, more: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        vllm.main(arguments(folder, "python", *more))
    assert message in capsys.readouterr().err
