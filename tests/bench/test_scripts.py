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
from adapter_oracle import added
from peft import get_peft_model
from scripts import base_answers_and_prompts, commands_here, few_texts, load_script
from tiny_checkpoint import make_model, make_tokenizer, save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec.methods.registry import get_method
from hf_spec.tools.bench.contenders import BASELINE, contenders
from hf_spec.tools.bench.prompts import Prompt, read_prompts
from hf_spec.tools.cli.train import parse_options
from hf_spec.tools.loading import Adapter
from hf_spec.tools.training.arguments import config_fields

#: What vLLM's interpreter is asked, and its answers: the model's own greedy tokens, from a file.
VLLM = """
import json, pathlib, sys
asked = json.load(sys.stdin)
known = json.loads(pathlib.Path({known!r}).read_text())
tokens = [known[str(ids)] for ids in asked["prompts"]]
assert not any(ids in asked["prompts"] for ids in asked["warm"])
if asked["speculative"]:
    tokens[-1] = tokens[-1][:-1]
calls = len(tokens) if asked["batch_size"] == 1 else 1
print(json.dumps(dict(version="9.9", torch="1.0", seconds=[0.1] * calls, tokens=tokens)))
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
            made = chosen.adapter_config(**config)
            assert all(getattr(made, key) == value for key, value in config.items())
            chosen.parse_options(line.options)
    text = " ".join(page.read_text() for page in (Path(__file__).parents[2] / "docs").rglob("*.md"))
    named = re.findall(r"papers\.py ((?:[a-z]+(?:-[a-z]+)*\b ?)+)", text)
    names = {name for words in named for name in words.split()}
    assert len(names) > 5 and names <= set(script.TABLES)


#: Words of a program's command, a file that it writes and what this says.
RUNS = {
    "all": (
        "--model {base} --prompts {prompts} --limit 2 --max-new-tokens 4 --threads 1 "
        "--dtype float32 --batch-sizes 1,2 --contexts 100 --only batches,tasks,contexts "
        "--output {out}",
        "figures.md", "## Batch sizes, greedy.*prompt_lookup.*## Each task",
    ),
    "comparison": (
        "--model {base} --answers {answers} --prompts {prompts} --limit 2 --max-new-tokens 6 "
        "--threads 1 --methods medusa --output {out}",
        "comparison.md", "`prompt_lookup`.*`medusa`",
    ),
    "spec_bench": (
        "--model {base} --prompts {few} --dtype float32 --max-new-tokens 8 "
        "--strategies prompt_lookup,transformers:prompt_lookup --output {out}/answers.jsonl",
        "answers-transformers_prompt_lookup.jsonl", "question_id.*accept_lengths",
    ),
    "threshold": (
        "--model {base} --adapter {skip} --prompts {prompts} --dtype float32 --stages 30 "
        "--max-new-tokens 20 --first 0.5 --output {out}/threshold.svg",
        "threshold.svg", "drafting stages",
    ),
    "recycling": (
        "contexts successors samples rollouts --model {base} --prompts {prompts} --limit 1 "
        "--samples 2 --temperature 1 --max-new-tokens 8 --output {out}/recycling.json",
        "recycling.json", r'"the same, accepted nodes only": \[\s*1.*"both": \[\s*[1-9]',
    ),
    "wide": (
        "{base} --layers 5 --adapter {heads} --output {out}/deep",
        "deep/adapters/heads/adapter_config.json", "MEDUSA",
    ),
    "train_hybrid_model": ("{base} {out} {answers}/train.jsonl --steps 1", "config.json",
                           "qwen3_5_text"),
    "gpu": (
        "--model {base} --adapter {heads} --shape tiny --only medusa --contexts 60 --batches 1 "
        "--new-tokens 8 --prompts 1 --here --output {out}/gpu.json",
        "gpu.json", '"medusa",.*"synthetic": false',
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the commands name."""
    folder = tmp_path_factory.mktemp("scripts")
    base, answers, prompts = base_answers_and_prompts(folder, layers=4)
    configs = {
        "skip": hf_spec.LayerSkipConfig(skip_attention=[1]),
        "heads": hf_spec.MedusaConfig(num_heads=2),
    }
    for name, config in configs.items():
        model = AutoModelForCausalLM.from_pretrained(base)
        get_peft_model(model, config).save_pretrained(folder / name)
    own = {name: folder / name for name in configs}
    own["few"] = write_prompts(folder / "few.jsonl", [{"prompt": "abab" * 5, "question_id": 8}])
    return {"base": base, "answers": answers, "prompts": prompts, **own}


@pytest.mark.parametrize("name", RUNS)
def test_runs(tmp_path, monkeypatch, made, name):
    script: Any = load_script(name)
    if name in ("all", "comparison"):
        commands_here(script, monkeypatch)
    if name == "train_hybrid_model":
        monkeypatch.setattr(script, "SEQ_LENGTH", 48)
        monkeypatch.setattr(script, "HELD_OUT", 2)
    if name == "gpu":
        few_texts(sys.modules["long_prompts"].KINDS, monkeypatch)
        monkeypatch.setattr(script, "plan", lambda args: [script.Cell("medusa", context=60)])
    words, file, said = RUNS[name]
    script.main(shlex.split(words.format(out=tmp_path, **made)))
    assert re.search(said, (tmp_path / file).read_text(encoding="utf-8"), re.DOTALL)


def test_contexts(monkeypatch, made, capsys):
    """A row for each length and strategy, in turns; the same tokens for each."""
    script: Any = load_script("contexts")
    few_texts(script.long_prompts.KINDS, monkeypatch)
    monkeypatch.setattr(script.subprocess, "run", lambda words, check: script.main(words[2:]))
    given = ["--model", str(made["base"]), "--adapter", str(made["heads"])]
    given += ["--strategies", "transformers", "medusa", "--lengths", "150", "--new-tokens", "9"]
    script.main([*given, "--threads", str(torch.get_num_threads())])
    heads, _, *rows = capsys.readouterr().out.splitlines()
    assert "ms a step" in heads
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [row[1] for row in cells] == ["transformers", "medusa"] * 2
    assert {row[0] for row in cells} == {cells[0][0]} and cells[0][4] == "1.00"
    assert all(float(row[4]) >= 1 for row in cells)


# -- other programs -------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 2])
def test_vllm(tmp_path, at_once):
    """With a stand-in for the interpreter that has vLLM; calls of several threads share steps."""
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
        "--batch-size", str(at_once),
    ])  # fmt: skip
    rows = {row["name"]: row for row in json.loads((tmp_path / "r.json").read_text())["results"]}
    alone = ["generate", "generate+compiled", "prompt_lookup", "prompt_lookup+compiled"]
    together = ["transformers:generate_batch", "prompt_lookup+shared"]
    assert list(rows) == ["vLLM", "vLLM, n-gram", *(alone if at_once == 1 else together)]
    for name, row in rows.items():
        same = 0.5 if name == "vLLM, n-gram" else 1.0
        assert row["same_as_vllm"] == row["same_as_plain"] == same
    assert rows["vLLM"]["tokens_per_second"] == pytest.approx(12 / (0.2 / at_once))


def test_long_prompts(tmp_path, monkeypatch, capsys):
    """The same each time, no longer than asked for."""
    folder = str(save_checkpoint(tmp_path / "model"))
    words = ["long_prompts.py", "--model", folder, "--lengths", "2048", "--count", "1"]
    script: Any = load_script("long_prompts")
    few_texts(script.KINDS, monkeypatch)
    for name in ("one", "two"):
        monkeypatch.setattr("sys.argv", [*words, "-o", str(tmp_path / name)])
        script.main()
    assert "2 prompts" in capsys.readouterr().out
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    prompts = read_prompts(tmp_path / "one")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for one in prompts:
        size = int(one.category[0]) * 1024
        assert 0.8 * size < len(tokenizer(one.text)["input_ids"]) <= size
    for lengths in ("100", "100000000"):
        monkeypatch.setattr("sys.argv", [*words[:3], "--lengths", lengths, "-o", "none"])
        with pytest.raises(SystemExit):
            script.main()
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
    added(model, hf_spec.SpaceConfig(num_mask_tokens=2, update="lora"), "tuned", std=0.2)
    adapter = Adapter("at/tuned", "tuned", "space", {}, True)
    tuned = next(one for one in contenders(["space"], None, [adapter]) if one.name == one.baseline)
    found = script.scores(model, make_tokenizer(), prompts, [BASELINE, tuned], 8, batch_size=2)
    assert [one.name for one in found] == ["generate", "generate@tuned"]
    assert found[0].identical == 1.0 and found[1].perplexity != found[0].perplexity
    assert script._last_number("3 and 1,200.5 in all") == 1200.5
