"""What is said of adapters that are there, but not those that are asked for."""

from pathlib import Path

import pytest
import torch
from conftest import Tiny, prompt
from peft import get_peft_model
from running import drafting
from transformers import GenerationConfig

import hf_spec


def test_another_adapter_is_active(fresh: Tiny) -> None:
    model = fresh("llama")
    model.add_adapter(hf_spec.MedusaConfig(num_heads=2))
    with pytest.raises(ValueError, match="type EAGLE3: MEDUSA is active: name 'medusa', or 'auto'"):
        model.generate(prompt(), max_new_tokens=3, **drafting("eagle3"))
    model.disable_adapters()
    with pytest.raises(ValueError, match="type EAGLE3: load one with"):
        model.generate(prompt(), max_new_tokens=3, **drafting("eagle3"))


def test_a_name_that_is_taken(fresh: Tiny, tmp_path: Path) -> None:
    get_peft_model(fresh("llama"), hf_spec.MedusaConfig(num_heads=2)).save_pretrained(tmp_path)
    model = fresh("llama")
    model.load_adapter(tmp_path)
    with pytest.raises(ValueError, match="named 'default': give this .*adapter_name='medusa'"):
        model.load_adapter(tmp_path)
    model.load_adapter(tmp_path, adapter_name="medusa")


def test_fields_that_there_are_not() -> None:
    with pytest.raises(ValueError) as refusal:
        hf_spec.MedusaConfig(heads=3)
    message = "MedusaConfig has no field 'heads' (did you mean 'num_heads'?)."
    assert str(refusal.value) == message  # nothing of files


def test_a_folder_that_is_no_adapter_s(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the folder has no generation_config.json, so that it is no"):
        hf_spec.SpecConfig.from_pretrained(tmp_path)


def test_a_model_s_folder_names_no_strategy(tmp_path: Path) -> None:
    GenerationConfig(max_new_tokens=3, max_ngram=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its generation_config.json names no assistant_strategy"):
        hf_spec.SpecConfig.from_pretrained(tmp_path)
    config = hf_spec.SpecConfig.from_pretrained(tmp_path, assistant_strategy="prompt_lookup")
    assert (config.max_new_tokens, config.max_ngram) == (3, 2)  # fields of others are kept
    with pytest.raises(ValueError, match="max_ngram=2 beside"):
        hf_spec.SpecConfig.from_pretrained(tmp_path, assistant_strategy="plain", max_ngram=2)


@pytest.mark.parametrize("strategy", ["medusa", "auto"])
def test_what_adapter_may_name(fresh: Tiny, tmp_path: Path, strategy: str) -> None:
    wrapped = get_peft_model(fresh("llama"), hf_spec.MedusaConfig(num_heads=2))
    wrapped.save_pretrained(tmp_path / "heads")
    model = fresh("llama")
    model.add_adapter(hf_spec.MedusaConfig(num_heads=2), "mine")
    model.config.save_pretrained(tmp_path / "model")
    refused = {
        5: "adapter=5: give an adapter's folder",
        "mine": "adapter='mine': this one is attached to the model. Leave adapter out",
        str(tmp_path / "model"): "no adapter_config.json; it is a model's. Give an adapter's",
    }
    for place, message in refused.items():
        call = drafting("medusa", adapter=place) | {"assistant_strategy": strategy}
        with pytest.raises(ValueError, match=message):
            model.generate(prompt(), max_new_tokens=3, **call)
    call = drafting("medusa", adapter=tmp_path / "heads") | {"assistant_strategy": strategy}
    found = model.generate(prompt(), max_new_tokens=3, **call)
    assert found.tolist() == model.generate(prompt(), max_new_tokens=3).tolist()
    kwargs = hf_spec.SpecConfig(strategy, {"adapter": tmp_path}).assistant_kwargs
    assert kwargs == {"adapter": str(tmp_path)}  # which JSON can hold


def test_what_is_no_method() -> None:
    with pytest.raises(ValueError, match=r"register_method\('x'\): give a hf_spec.Method"):
        hf_spec.register_method("x")  # type: ignore[arg-type]


def test_an_objective_that_returns_a_tensor(fresh: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = get_peft_model(fresh("llama"), hf_spec.MedusaConfig(num_heads=2))
    monkeypatch.setattr(type(wrapped.base_model), "objective", lambda *_: torch.zeros(()))
    with pytest.raises(TypeError, match="MEDUSA returned a Tensor: return a dict with 'loss'"):
        wrapped(prompt(), labels=prompt(), anchors=prompt()[:, :2])
