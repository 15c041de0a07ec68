"""``hf-spec doctor``: what it says of the environment and of models."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_spec
from hf_spec.adapters.active import find_active
from hf_spec.bench import diagnosis
from hf_spec.cli import main
from hf_spec.cli.doctor import imported_from, supported, swept

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


@pytest.mark.usefixtures("mtp_as_shipped")
def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    model, adapter = str(DEMO / "model"), str(DEMO / "adapters" / "medusa")
    command = ["doctor", "--model", model, "--adapter", adapter, "--json"]
    assert main([*command, "--limit", "2", "--max-new-tokens", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    about = found["environment"]
    assert (about["torch"], about["hf_spec"]) == (torch.__version__, hf_spec.__version__)
    assert about["device"] in ("cpu", "cuda", "mps", "xpu")
    refused = {name: why for name, why in found["strategies"].items() if why is not None}
    assert set(found["strategies"]) == set(hf_spec.strategies()) and set(refused) == {"mtp"}
    assert found["auto"]["takes"] == "medusa: its adapter 'adapter_0' is active"
    assert "no layers for multi-token prediction" in found["auto"]["not mtp"]
    assert "same tokens as plain generate" in found["sweep"]["llama"]
    measured = found["acceptance of medusa, 2 prompts"]
    assert float(measured["tau"].split()[0]) >= 1 and measured["positions"].startswith("1: ")
    assert measured["tasks"].split()[0] == "question"
    assert any("no chat template" in line for line in found["findings"])
    assert any("Training ended with tau" in line for line in found["findings"])
    assert f"hf-spec bench --model {model} --adapter {adapter} --by-task" in found["next"]


def test_a_clone_that_hides_an_installed_copy_is_said(monkeypatch, tmp_path) -> None:
    def copy(place: Path, url: str = "") -> SimpleNamespace:
        direct = json.dumps({"url": url}) if url else None
        return SimpleNamespace(
            version="9", locate_file=lambda name: place / name, read_text=lambda name: direct
        )

    here = Path(hf_spec.__file__).resolve().parent
    (tmp_path / "hf_spec").mkdir()
    nowhere = tmp_path / "site-packages"
    for found, hides in (
        ([], False),
        ([copy(here.parent)], False),
        ([copy(nowhere, here.parent.as_uri())], False),  # installed with pip install -e
        ([copy(nowhere)], False),
        ([copy(here.parent), copy(tmp_path)], True),
        ([copy(nowhere, tmp_path.as_uri())], True),
    ):
        monkeypatch.setattr("hf_spec.cli.doctor.distributions", lambda name, found=found: found)
        said = imported_from()
        assert said.startswith(str(here)) and (said != str(here)) == hides
        assert not hides or f"hides version 9 installed in {tmp_path / 'hf_spec'}" in said


def test_types_of_the_sweep(tiny) -> None:
    assert swept(tiny("llama"))["llama"].startswith("the same tokens as plain generate")
    hybrid = SimpleNamespace(model_type="nemotron_h", get_text_config=lambda: hybrid)
    assert "not with bita" in swept(SimpleNamespace(config=hybrid))["nemotron_h"]
    rwkv = SimpleNamespace(model_type="rwkv", get_text_config=lambda: rwkv)
    found = swept(SimpleNamespace(config=rwkv))
    assert found["rwkv"].startswith("works with no strategy: RwkvForCausalLM")
    other = SimpleNamespace(model_type="mine", get_text_config=lambda: other)
    assert "not among the types" in swept(SimpleNamespace(config=other))["mine"]


def test_layer_numbers_that_are_off_by_one_are_found(fresh) -> None:
    """The condition is made: the config names other layers than the drafter was made for."""
    model = fresh("llama")
    model.add_adapter(hf_spec.Eagle3Config(layers=[1, 2]), "mine")
    active = find_active(model, "EAGLE3")
    asked: list[list[int]] = []
    for shift in (-1, 1, 2):
        with diagnosis._shifted(active.config, shift, 3) as layers:
            asked.append(layers)
            assert layers is None or active.config.layers == layers
        assert active.config.layers == [1, 2]
    assert asked == [[0, 1], [2, 3], None]
    found = diagnosis.Diagnosis("eagle3", 1.5, 1.0, [0.6, 0.5], {"all": 1.5})
    found.conditions = {"layers [0, 1]": 2.0, "enable_thinking=True": 1.9, "layers [2, 3]": 1.55}
    lines = list(diagnosis._findings(found, SimpleNamespace(chat_template="x"), active, None))
    assert len(lines) == 3 and lines[0].startswith("With layers [0, 1] instead of its own")
    assert "with enable_thinking=True (tau 1.90)" in lines[1]
    assert lines[2].startswith("Drafts are accepted, but steps with drafts take longer")
    found.conditions = {}
    (line,) = diagnosis._findings(found, SimpleNamespace(chat_template="x"), active, None)
    assert line.startswith("Drafts are accepted, but")


def test_an_adapter_needs_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--adapter", "anything"]) == 2
    assert "--adapter needs --model" in capsys.readouterr().err
