"""The programs in ``benchmarks/`` run on a tiny model, and figures that pages quote are right."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import prompt
from peft import get_peft_model
from scripts import base_answers_and_prompts, commands_here, load_script
from tiny_checkpoint import make_model, make_tokenizer, save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec.methods.registry import get_method, methods
from hf_spec.tools.bench.contenders import BASELINE, Adapter, contenders
from hf_spec.tools.bench.prompts import Prompt, read_prompts
from hf_spec.tools.cli.train import parse_options
from hf_spec.tools.training.train import config_fields

CUDA = [
    "--shape", "tiny", "--device", "cpu", "--backend", "eager", "--contexts", "24",
    "--batch-sizes", "2", "--candidates", "5", "--repeats", "2", "--calls", "1",
    "--new-tokens", "16",
]  # fmt: skip
WAYS = ("uncompiled", "eager")
#: What vLLM's interpreter is asked, and its answers: the model's own greedy tokens, from a file.
VLLM = """
import json, pathlib, sys
asked = json.load(sys.stdin)
known = json.loads(pathlib.Path({known!r}).read_text())
tokens = [known[str(ids)] for ids in asked["prompts"]]
assert not any(ids in asked["prompts"] for ids in asked["warm"])
if asked["speculative"]:
    tokens[-1] = tokens[-1][:-1]
print(json.dumps(dict(version="9.9", torch="1.0", seconds=[0.1] * len(tokens), tokens=tokens)))
"""


# -- those that run commands, each once -----------------------------------------------------------


def test_papers(tmp_path, monkeypatch, capfd):
    """A table is made once: what is there stays, what was interrupted is measured again."""
    script: Any = load_script("papers")
    run = commands_here(script, monkeypatch)
    base, answers, prompts = base_answers_and_prompts(tmp_path)
    small = script.Table("A table", script.TABLES["bita-trees"].lines[:2])
    monkeypatch.setitem(script.TABLES, "small", small)
    given = [
        "small", "--model", str(base), "--prompts", str(prompts), "--limit", "3",
        "--max-new-tokens", "6", "--dtype", "float32", "--output", str(tmp_path / "out"),
        "--answers", str(answers),
    ]  # fmt: skip
    script.main(given)
    assert [words[0] for words in run] == ["train", "bench", "bench"]  # two trees of one adapter
    assert "efficient3-seed0" in capfd.readouterr().out
    place = tmp_path / "out/small/efficient3-seed0/results.json"
    cut = json.loads(place.read_text())
    cut["environment"]["interrupted"] = True
    place.write_text(json.dumps(cut))
    script.main(given)
    assert [words[0] for words in run[3:]] == ["bench"]


def test_every_line_of_the_papers_can_be_made():
    """Fields of the adapter's config and options of the strategy, in values that go together;
    pages name tables that there are."""
    script: Any = load_script("papers")
    for table in script.TABLES.values():
        for line in table.lines:
            method, *words = shlex.split(line.adapter.replace("{skip}", "[1]"))
            pairs = [*zip(words[::2], words[1::2])]
            fields = [word for pair in pairs if pair[0] != "--dtype" for word in pair]
            chosen = get_method(method)
            fields += shlex.split("" if method == "layer_skip" else script.PAPER)
            assert chosen.adapter_config is not None
            config, _ = parse_options(fields, method, config_fields(chosen))
            made = chosen.adapter_config(**{**chosen.trained, **config})
            assert all(getattr(made, key) == value for key, value in config.items())
            chosen.parse_options(line.options)
    text = " ".join(page.read_text() for page in (Path(__file__).parents[2] / "docs").rglob("*.md"))
    named = re.findall(r"papers\.py ((?:[a-z]+(?:-[a-z]+)*\b ?)+)", text)
    names = {name for words in named for name in words.split()}
    assert len(names) > 5 and names <= set(script.TABLES)


def test_all(tmp_path, monkeypatch):
    script: Any = load_script("all")
    run = commands_here(script, monkeypatch)
    rows = [{"category": "sums", "turns": [f"{n} and {n + 1} " * 9]} for n in range(4)]
    script.main([
        "--model", str(save_checkpoint(tmp_path / "base", layers=1)),
        "--prompts", str(write_prompts(tmp_path / "p.jsonl", rows)), "--limit", "2",
        "--max-new-tokens", "4", "--threads", "1", "--dtype", "float32", "--batch-sizes", "1,2",
        "--contexts", "100", "--output", str(tmp_path / "out"), "--only", "batches,tasks,contexts",
    ])  # fmt: skip
    assert {words[0] for words in run} == {"bench"}
    page = (tmp_path / "out" / "figures.md").read_text()
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert "## Batch sizes, greedy" in titles and "## Each task" in titles
    assert "| `prompt_lookup` |" in page and "tokens/s" in page
    with pytest.raises(SystemExit):
        script.main(["--only", "speed"])


def test_comparison(tmp_path, monkeypatch):
    script: Any = load_script("comparison")
    run = commands_here(script, monkeypatch)
    base, answers, prompts = base_answers_and_prompts(tmp_path)
    script.main([
        "--model", str(base), "--answers", str(answers), "--prompts", str(prompts), "--limit", "2",
        "--max-new-tokens", "6", "--threads", "1", "--output", str(tmp_path / "out"),
        "--methods", "medusa",
    ])  # fmt: skip
    assert [words[0] for words in run] == ["train", "bench", "bench", "bench"]
    table = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert [line.split("`")[1] for line in table[2:]] == ["prompt_lookup", "medusa"]


# -- other programs -------------------------------------------------------------------------------


def test_cuda(tmp_path, monkeypatch):
    """Each strategy with random weights of its own; compiled calls take time, and are left out."""
    cuda: Any = load_script("cuda")
    monkeypatch.setitem(cuda.SHAPES, "tiny", (32, 4, 2, 1, 64, 64))
    both = cuda.Bench.strategy
    monkeypatch.setattr(cuda.Bench, "plain", lambda self: dict.fromkeys(WAYS, self._plain))
    monkeypatch.setattr(
        cuda.Bench, "strategy", lambda self, *given: {WAYS[0]: both(self, *given)[WAYS[0]]}
    )
    monkeypatch.setattr(cuda.Bench, "forwards", lambda self: iter(()))
    cuda.main([*CUDA, "--output", str(tmp_path / "results.json")])
    rows = json.loads((tmp_path / "results.json").read_text())["strategies"]
    assert [row["strategy"] for row in rows] == [*methods()]
    for row in rows:
        assert "error" not in row and (row["drafted"] > 0) == (row["strategy"] != "plain"), row
        assert 0 < row["low_ms"] <= row["ms"] <= row["high_ms"]


@pytest.mark.environment
@pytest.mark.usefixtures("sizes_as_shipped")  # each number of tokens has code of its own
def test_cuda_compiled(tmp_path, monkeypatch):
    cuda: Any = load_script("cuda")
    monkeypatch.setitem(cuda.SHAPES, "tiny", (32, 4, 2, 1, 64, 64))
    cuda.main([*CUDA, "--tokens", "1,4", "--output", str(tmp_path / "results.json")])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["skipped"] == []
    for row in [*results["forward"], *results["strategies"]]:
        assert row["ratio"] > 0 and (row["made"] > 0) == (row["way"] == "eager")


def test_vllm(tmp_path):
    """With a stand-in for the interpreter that has vLLM."""
    vllm: Any = load_script("vllm")
    save_checkpoint(tmp_path / "model", layers=1)
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "abcabcabc"}, {"prompt": "hello"}])
    model, tokenizer = vllm.load_model(str(tmp_path / "model"), "float32", "cpu")
    known = {}
    for ids in vllm.encode_prompts(model, tokenizer, vllm.read_prompts(prompts), 6)[0]:
        row = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0]
        known[str(ids)] = row[len(ids) :].tolist()
    (tmp_path / "known.json").write_text(json.dumps(known))
    (tmp_path / "answers.py").write_text(VLLM.format(known=str(tmp_path / "known.json")))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "answers.py"}"\n')
    python.chmod(0o755)
    vllm.main([
        "--vllm-python", str(python), "--model", str(tmp_path / "model"), "--threads", "1",
        "--prompts", str(prompts), "--max-new-tokens", "6", "--repeats", "2",
        "--strategies", "prompt_lookup", "--backend", "eager", "--json", str(tmp_path / "r.json"),
    ])  # fmt: skip
    rows = {row["name"]: row for row in json.loads((tmp_path / "r.json").read_text())["results"]}
    assert list(rows) == [
        "vLLM", "vLLM, n-gram", "generate", "generate+compiled", "prompt_lookup",
        "prompt_lookup+compiled",
    ]  # fmt: skip
    for name, row in rows.items():
        same = 0.5 if name == "vLLM, n-gram" else 1.0
        assert row["same_as_vllm"] == row["same_as_plain"] == same
    assert rows["vLLM"]["tokens_per_second"] == pytest.approx(12 / 0.2)


def test_spec_bench(tmp_path):
    """Answer files as Spec-Bench's own ``evaluation/speed.py`` reads them."""
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["abab" * 5, "and then"]},
        {"question_id": 401, "category": "qa", "turns": ["xyz" * 6]},
    ]
    load_script("spec_bench").main([
        "--model", str(save_checkpoint(tmp_path / "m")), "--dtype", "float32",
        "--prompts", str(write_prompts(tmp_path / "question.jsonl", rows)),
        "--output", str(tmp_path / "answers.jsonl"),
        "--strategies", "prompt_lookup,transformers:prompt_lookup", "--max-new-tokens", "20",
    ])  # fmt: skip
    for name in ("generate", "prompt_lookup", "transformers_prompt_lookup"):
        lines = (tmp_path / f"answers-{name}.jsonl").read_text().splitlines()
        answers = [json.loads(line) for line in lines]
        found = [(one["question_id"], one["category"]) for one in answers]
        assert found == [(81, "writing"), (401, "qa")]
        for answer in answers:
            (choice,) = answer["choices"]
            assert choice["new_tokens"] == [sum(choice["accept_lengths"])] == [20]
            assert choice["decoding_steps"] == [len(choice["accept_lengths"])]
            assert len(choice["turns"]) == 1 and choice["wall_time"][0] > 0


def test_threshold(tmp_path, capsys):
    adapter = get_peft_model(make_model(), hf_spec.LayerSkipConfig(skip_attention=[1]))
    adapter.save_pretrained(tmp_path / "skip")
    load_script("threshold").main([
        "--model", str(save_checkpoint(tmp_path / "model")), "--adapter", str(tmp_path / "skip"),
        "--stages", "30", "--output", str(tmp_path / "threshold.svg"), "--dtype", "float32",
        "--max-new-tokens", "20", "--first", "0.5",
        "--prompts", str(write_prompts(tmp_path / "one.jsonl", [{"prompt": "ab ab"}] * 9)),
    ])  # fmt: skip
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("one")]
    values = [float(re.findall(r"[0-9.]+", row)[1]) for row in rows[:-1]]
    assert values[0] == 0.5 and len({*values}) > 1
    assert "drafting stages" in (tmp_path / "threshold.svg").read_text(encoding="utf-8")


def test_grow(tmp_path):
    """A deeper model answers as the small one, and its adapters fit it."""
    small, deep = save_checkpoint(tmp_path / "small"), tmp_path / "deep"
    peft = get_peft_model(make_model(), hf_spec.MedusaConfig(num_heads=2))
    peft.save_pretrained(tmp_path / "heads")
    load_script("grow").main(
        [str(small), "--layers", "5", "--output", str(deep), "--adapter", str(tmp_path / "heads")]
    )
    model, ids = AutoModelForCausalLM.from_pretrained(deep), prompt(9, seed=0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, make_model()(ids).logits)
    settings = {"max_new_tokens": 12, "do_sample": False}
    model.load_adapter(str(deep / "adapters" / "heads"))
    found = model.generate(ids, **settings, assistant_strategy="medusa")
    assert found.tolist() == make_model().generate(ids, **settings).tolist()


def test_train_hybrid_model(tmp_path, monkeypatch):
    script: Any = load_script("train_hybrid_model")
    monkeypatch.setattr(script, "SEQ_LENGTH", 48)
    monkeypatch.setattr(script, "HELD_OUT", 2)
    folder = save_checkpoint(tmp_path / "llama", layers=4)
    rows = [{"question": "a b", "answer": "c"}, {"prompt": "b", "completion": "a c"}] * 30
    data = write_prompts(tmp_path / "data.jsonl", rows)
    script.main([str(folder), str(tmp_path / "out"), str(data), "--steps", "1"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.model_type == "qwen3_5_text" and model.dtype == torch.bfloat16


def test_long_prompts(tmp_path, monkeypatch, capsys):
    """The same each time, no longer than asked for."""
    folder = str(save_checkpoint(tmp_path / "model"))
    words = ["long_prompts.py", "--model", folder, "--lengths", "2048", "4096", "--count", "2"]
    for name in ("one", "two"):
        monkeypatch.setattr("sys.argv", [*words, "-o", str(tmp_path / name)])
        load_script("long_prompts").main()
    assert "8 prompts" in capsys.readouterr().out
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    prompts = read_prompts(tmp_path / "one")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for one in prompts:
        size = int(one.category[0]) * 1024
        assert 0.8 * size < len(tokenizer(one.text)["input_ids"]) <= size
    for lengths in ("100", "100000000"):
        monkeypatch.setattr("sys.argv", [*words[:3], "--lengths", lengths, "-o", "none"])
        with pytest.raises(SystemExit):
            load_script("long_prompts").main()
        assert "give numbers from 129 to" in capsys.readouterr().err


# -- figures --------------------------------------------------------------------------------------


def results(folder: Path, rows: dict[str, list[tuple[float, float, float]]]) -> Path:
    """Results with calls of these tokens, forwards and seconds, one per prompt."""
    calls = [
        {
            "strategy": name, "batch_size": 1, "prompts": [index], "new_tokens": tokens,
            "row_steps": steps, "seconds": seconds,
        }
        for name, own in rows.items()
        for index, (tokens, steps, seconds) in enumerate(own)
    ]  # fmt: skip
    runs = [{"strategy": name, "batch_size": 1, "baseline": "generate"} for name in rows]
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"runs": runs, "calls": calls}))
    return folder


def test_compare(tmp_path, capsys):
    """Twice and three times as fast on every prompt, whose lengths differ: certain when paired."""
    script: Any = load_script("compare")
    lengths = np.random.default_rng(0).integers(20, 90, 16).tolist()
    rows = {
        "generate": [(n, n, 1.0 * n) for n in lengths],
        "a": [(n, n, 0.5 * n) for n in lengths],
        "b": [(2 * n, n, n / 1.5) for n in lengths],
    }
    first = results(tmp_path / "first", rows)
    found = script.read([first])
    assert [one.name for one in found] == ["a", "b"]
    (difference, ends), (ratio, speeds) = script.beside(found[1], found[0])
    assert difference == 1.0 and ends == (1.0, 1.0)
    assert ratio == pytest.approx(1.5) and speeds == pytest.approx((1.5, 1.5))
    script.main([str(first), "--against", "b"])
    assert "beside b" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main([str(first), "--against", "c"])
    assert "--against c: there is no such contender, only a" in capsys.readouterr().err
    other = script.Measured("other", 1, {(99,): (1, 1, 1.0, 1, 1, 1.0)})
    with pytest.raises(ValueError, match="'a' and 'other' have answered different prompts"):
        script.beside(found[0], other)


def test_space_quality():
    script: Any = load_script("space_quality")
    prompts = [Prompt("abc abc", reference="abd"), Prompt("one two", reference="7 of 1,200")]
    model = make_model()
    torch.manual_seed(0)
    model.add_adapter(hf_spec.SpaceConfig(num_mask_tokens=2, update="lora"), "tuned")
    with torch.no_grad():
        for parameter in model.spec_modules.parameters():
            parameter.normal_(std=0.2)
    adapter = Adapter("at/tuned", "tuned", "space", {}, True)
    tuned = next(one for one in contenders(["space"], None, [adapter]) if one.name == one.baseline)
    found = script.scores(model, make_tokenizer(), prompts, [BASELINE, tuned], 8, batch_size=2)
    assert [one.name for one in found] == ["generate", "generate@tuned"]
    assert found[0].identical == 1.0 and found[1].perplexity != found[0].perplexity
    assert script._last_number("3 and 1,200.5 in all") == 1200.5
