"""``hf-spec doctor``: what it says of the environment and of models."""

import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import make_model, make_tokenizer

import hf_spec
from hf_spec.decoding.call import choose
from hf_spec.tools.bench.checking import diagnose, supported
from hf_spec.tools.bench.prompts import Prompt
from hf_spec.tools.bench.runner import Session
from hf_spec.tools.cli import main

DEMO = Path(hf_spec.__file__).parent / "tools" / "demo"


def test_every_strategy_works_on_a_llama_which_keeps_its_adapter(fresh):
    model = fresh("llama")
    model.add_adapter(hf_spec.MedusaConfig(num_heads=2), "mine")
    assert supported(model) == dict.fromkeys(hf_spec.strategies())
    assert model.active_adapters() == ["mine"] and list(model.peft_config) == ["mine"]


def test_what_is_in_the_way_is_said(fresh):
    model = fresh("llama")
    model.config.is_encoder_decoder = True
    found = supported(model)
    assert all(reason and "encoder-decoder" in reason for reason in found.values())


@pytest.mark.usefixtures("mtp_as_shipped")
def test_the_command_prints_json(capsys):
    model, adapter = str(DEMO / "model"), str(DEMO / "adapters" / "medusa")
    command = ["doctor", "--model", model, "--adapter", adapter, "--json"]
    assert main([*command, "--limit", "2", "--max-new-tokens", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    about = found["environment"]
    assert (about["torch"], about["hf_spec"]) == (torch.__version__, hf_spec.__version__)
    assert about["device"] in ("cpu", "cuda", "mps", "xpu")
    tried = found["strategies"]
    assert set(tried) == set(hf_spec.strategies()) and "mtp" in tried
    refused = tried.pop("mtp")
    assert refused.startswith("refused: ") and "`hf-spec train --help`" in refused
    untrained = {name for name, said in tried.items() if said == "works, tried with random weights"}
    assert {"bita", "ppd"} <= untrained and "medusa" not in untrained
    assert {tried[name] for name in {*tried} - untrained} == {"works"}
    assert found["auto"]["takes"] == "medusa: its adapter 'adapter_0' is active"
    assert {*found["auto"]} == {"takes"}  # an active adapter comes first
    measured = found["acceptance of medusa, 2 prompts"]
    assert float(measured["tau"].split()[0]) >= 1 and measured["positions"].startswith("1: ")
    assert measured["speedup"].endswith("with the default options, which also look up n-grams")
    assert measured["tasks"].split()[0] == "question"
    assert any("no chat template" in line for line in found["findings"])
    assert any("Training ended with tau" in line for line in found["findings"])
    assert f"hf-spec bench --model {model} --adapter {adapter} --by-task" in found["next"]
    assert f"hf-spec check {adapter} --model {model}" in found["next"]


def test_an_interrupt_ends_it(monkeypatch):
    """And nothing is said of what was not measured."""
    model, tokenizer = make_model(), make_tokenizer()
    given = model, tokenizer, [Prompt("def add(a, b):")], choose(model)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "generate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        diagnose(*given, {}, 16)


def test_an_adapter_needs_its_model(capsys):
    assert main(["doctor", "--adapter", "anything"]) == 2
    assert "--adapter needs --model" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer(tmp_path, capsys):
    for make, message in (
        (make_model(), "Couldn't instantiate the backend tokenizer from one of: (1)"),
        (hf_spec.MedusaConfig(), "it is an adapter without a tokenizer; give its base model"),
    ):
        make.save_pretrained(tmp_path)
        assert main(["doctor", "--model", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
