"""The demo on a tiny model: its prompts, files, equality."""

import json

import pytest
from scripts import load_script
from tiny_checkpoint import make_model, save_checkpoint, write_prompts

import hf_spec
from hf_spec.tools import cli
from hf_spec.tools.bench.prompts import read_prompts
from hf_spec.tools.demo import demo
from hf_spec.tools.hub.folder import check_complete
from hf_spec.tools.loading import read_adapters


def test_prompts_are_beginnings_of_classes_of_no_model_of_transformers():
    found = read_prompts(demo.PROMPTS)
    assert len(found) == len({prompt.text for prompt in found}) >= 6  # the default of --limit
    for prompt in found:
        assert prompt.text.startswith("class Lake") and prompt.text.endswith("\n")
    known = load_script("demo_data")
    own, others = known.modeling_files(held_out=True), known.modeling_files()
    assert not {*own} & {*others} and len(others) > 100
    sources = [known.read_source(path) for path in own + others]
    assert sources[0].startswith('"""')  # no license
    assert not any("class Lake" in source for source in sources)


@pytest.fixture
def short_prompts(tmp_path, monkeypatch):
    rows = [{"prompt": prompt.text[:160]} for prompt in read_prompts(demo.PROMPTS)]
    monkeypatch.setattr(demo, "PROMPTS", write_prompts(tmp_path / "prompts.jsonl", rows))


@pytest.fixture
def tiny_model(tmp_path, short_prompts, monkeypatch):
    """A tiny model in place of the shipped one, without adapters; it has a token per byte and a
    context of 256."""
    folder = save_checkpoint(tmp_path / "model", chat=False)
    monkeypatch.setattr(demo, "model_folder", lambda: folder)
    monkeypatch.setattr(demo, "adapter_folders", list)


def demo_command(output, *more):
    return cli.main(["demo", "--output", str(output), "--dtype", "float32", *more])


def test_demo_writes_table_and_results(tmp_path, tiny_model, capsys):
    code = demo_command(tmp_path, "--limit", "3", "--max-new-tokens", "24")
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "Every output equals plain generate's." in printed.out
    assert "3 prompts, up to 24 new tokens each, plainly and with prompt_lookup\n" in printed.err
    assert "prompt_lookup" in printed.out and "speedup" in printed.out
    data = json.loads((tmp_path / "results.json").read_text())
    everything = {row["strategy"]: row for row in data["runs"] if row["task"] == "all"}
    assert set(everything) == {"generate", "prompt_lookup"}
    assert all(row["identical"] == row["prompts"] == 3 for row in everything.values())


def test_the_shipped_model_and_adapters(tmp_path, short_prompts, capsys):
    folder = demo.model_folder()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 16 * 2**20
    more = ("--limit", "1", "--max-new-tokens", "8")
    assert demo_command(tmp_path, *more) == 0, capsys.readouterr().err
    data = json.loads((tmp_path / "results.json").read_text())
    names = {row["strategy"] for row in data["runs"]}
    adapters = read_adapters(map(str, demo.adapter_folders()))
    assert names >= {"generate", "prompt_lookup", *(adapter.strategy for adapter in adapters)}
    assert {row["baseline"] for row in data["runs"]} == {"generate"}  # none changes the model
    assert not any(row["diverged"] for row in data["runs"])
    assert len(adapters) >= 6
    for adapter in demo.adapter_folders():
        check_complete(adapter)


def test_another_model_with_the_adapters_that_fit(tmp_path, monkeypatch, capsys):
    folder = save_checkpoint(tmp_path / "model")
    for name, layers in (("fits", 2), ("another", 3)):
        model = make_model(layers=layers)
        model.add_adapter(hf_spec.MedusaConfig(num_heads=2))
        model.save_pretrained(tmp_path / "published" / name)
    monkeypatch.setattr(demo, "PUBLISHED", tmp_path / "published")
    more = ("--model", str(folder), "--limit", "2", "--max-new-tokens", "8")
    assert demo_command(tmp_path / "out", *more) == 0, capsys.readouterr().err
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {row["strategy"] for row in data["runs"]} == {"generate", "prompt_lookup", "medusa"}
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
        assert base.count("/") == 1 and f"base_model: {base}" in card
