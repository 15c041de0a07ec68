"""``hf-spec doctor``: what it says of the environment and of models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hf_spec
from hf_spec.cli import main
from hf_spec.cli.doctor import supported

DEMO = Path(hf_spec.__file__).parent / "demo"


def test_every_strategy_works_on_a_llama_which_keeps_its_adapter(fresh) -> None:
    model = fresh("llama")
    model.add_adapter(hf_spec.MedusaConfig(num_heads=2), "mine")
    assert supported(model) == dict.fromkeys(hf_spec.strategies())
    assert model.active_adapters() == ["mine"] and list(model.peft_config) == ["mine"]


def test_what_is_in_the_way_is_said(fresh) -> None:
    model = fresh("llama")
    model.config.is_encoder_decoder = True
    found = supported(model)
    assert all(reason and "encoder-decoder" in reason for reason in found.values())


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    model, adapter = str(DEMO / "model"), str(DEMO / "adapters" / "medusa")
    assert main(["doctor", "--model", model, "--adapter", adapter, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    about = found["environment"]
    assert (about["torch"], about["hf_spec"]) == (torch.__version__, hf_spec.__version__)
    assert about["device"] in ("cpu", "cuda", "mps", "xpu")
    assert found["strategies"] == dict.fromkeys(hf_spec.strategies())


def test_an_adapter_needs_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--adapter", "anything"]) == 2
    assert "--adapter needs --model" in capsys.readouterr().err
