"""The demo on a tiny model: its prompts, files, equality."""

import json

from huggingface_hub import ModelCard
from scripts import load_script
from tiny_checkpoint import make_model, make_tokenizer, save_checkpoint, write_prompts

import hf_spec
from hf_spec.tools import cli, demo
from hf_spec.tools.bench.prompts import read_prompts
from hf_spec.tools.bench.results import Measurement
from hf_spec.tools.cli.bench import _Shown
from hf_spec.tools.data import Prompt
from hf_spec.tools.hub import check_complete
from hf_spec.tools.loading import read_adapters


def test_prompts_are_beginnings_of_classes_of_no_model_of_transformers():
    found = read_prompts(demo.PROMPTS)
    assert len(found) == len({prompt.text for prompt in found}) >= 8
    for prompt in found:
        assert prompt.text.startswith("class Lake") and prompt.text.endswith("\n")
    known = load_script("demo_data")
    own, others = known.modeling_files(held_out=True), known.modeling_files()
    assert not {*own} & {*others} and len(others) > 100
    sources = [known.read_source(path) for path in own + others]
    assert sources[0].startswith('"""')  # no license
    assert not any("class Lake" in source for source in sources)


def run_demo(output, *words):
    words = ["--max-new-tokens", "8", *words]
    assert cli.main(["demo", "--output", str(output), *words]) == 0
    return json.loads((output / "results.json").read_text())


def test_the_shipped_model_and_adapters(tmp_path, monkeypatch, capsys):
    rows = [{"prompt": prompt.text[:160]} for prompt in read_prompts(demo.PROMPTS)]
    monkeypatch.setattr(demo, "PROMPTS", write_prompts(tmp_path / "prompts.jsonl", rows))
    adapters = read_adapters(map(str, demo.adapter_folders()))
    data = run_demo(tmp_path)
    printed = capsys.readouterr()
    assert "Every output equals plain generate's." in printed.out
    assert "token_recycling" in printed.out and "speedup" in printed.out
    assert "2 prompts, up to 8 new tokens each, by a small model" in printed.out
    assert printed.out.count("the same text") == 2 * len(adapters) + 2
    assert "brackets" not in printed.out  # two prompts give no intervals
    assert data["environment"]["dtype"] == "float32" and data["environment"]["threads"] == 1
    everything = {row["strategy"]: row for row in data["runs"] if row["task"] == "all"}
    names = {"generate", "token_recycling", *(adapter.strategy for adapter in adapters)}
    assert everything.keys() >= names and {one.strategy for one in adapters} == {"bita", "medusa"}
    for row in everything.values():
        assert row["baseline"] == "generate", "none changes the model"
        assert row["identical"] == row["prompts"] == 2
    for adapter in demo.adapter_folders():
        check_complete(adapter)


def test_calls_are_shown_as_they_end_and_the_plain_one_first(capsys):
    """Of each prompt, whichever contender begins."""
    prompts = [Prompt("one\n"), Prompt("two\n")]
    shown = _Shown(make_tokenizer(), prompts, ["generate", "a", "b"])
    seen = []
    for index, order in enumerate((["generate", "a", "b"], ["a", "b", "generate"])):
        for name in order:
            row = [5, 6] if name == "b" and index else [5, 7]
            plain = name == "generate"
            shown.call(Measurement(name, 1, [index], "code", 1.0 + plain, [row], 2))
            seen.append([line.split()[0] for line in capsys.readouterr().out.splitlines()
                         if "tokens/s" in line])  # fmt: skip
    assert seen == [["generate"], ["a"], ["b"], [], [], ["generate", "a", "b"]]
    shown.call(Measurement("generate", 1, [0], "code", 1.0, [[5]], 2))
    assert "prompt 3 of 2" in capsys.readouterr().out


def test_another_model_with_the_adapters_that_fit(tmp_path, monkeypatch):
    folder = save_checkpoint(tmp_path / "model")
    for name, layers in (("fits", 2), ("another", 3)):
        model = make_model(layers=layers)
        model.add_adapter(hf_spec.MedusaConfig(num_heads=2))
        model.save_pretrained(tmp_path / "published" / name)
    monkeypatch.setattr(demo, "PUBLISHED", tmp_path / "published")
    data = run_demo(tmp_path / "out", "--model", str(folder), "--limit", "2")
    assert {row["strategy"] for row in data["runs"]} == {"generate", "token_recycling", "medusa"}
    assert data["environment"]["model"] == str(folder)


def test_the_published_adapters(tmp_path):
    """Complete, small, and of a model on the Hub."""
    found = sorted(demo.PUBLISHED.glob("*/adapter_config.json"))
    assert found
    for path in found:
        check_complete(path.parent)
        assert (path.parent / "adapter_model.safetensors").stat().st_size <= 8e6
        base = json.loads(path.read_text())["base_model_name_or_path"]
        card = (path.parent / "README.md").read_text()
        data = ModelCard(card).data
        assert base.count("/") == 1 and (data.base_model, data.library_name) == (base, "hf_spec")
        assert {one.metric_type for one in data.eval_results} >= {"tau", "speedup"}
        assert f"| {data.eval_results[0].metric_value} |" in card
