"""Grown models answer as the small one, and its adapters fit them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prompt
from peft import get_peft_model
from scripts import load_script
from tiny_checkpoint import make_model, save_checkpoint
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import hf_spec


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("grow")


def test_a_deeper_model_with_the_same_outputs(script: Any, tmp_path: Path) -> None:
    small, deep = save_checkpoint(tmp_path / "small"), tmp_path / "deep"
    peft = get_peft_model(make_model(), hf_spec.MedusaConfig(num_heads=2))
    peft.save_pretrained(tmp_path / "heads")
    script.main(
        [str(small), "--layers", "5", "--output", str(deep), "--adapter", str(tmp_path / "heads")]
    )
    model = AutoModelForCausalLM.from_pretrained(deep)
    assert len(model.model.layers) == 5
    ids = prompt(9, seed=0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, make_model()(ids).logits)
    settings = {"max_new_tokens": 12, "do_sample": False}
    plain = make_model().generate(ids, **settings)
    model.load_adapter(str(deep / "adapters" / "heads"))
    found = model.generate(ids, **settings, assistant_strategy="medusa")
    assert found.tolist() == plain.tolist()


def test_what_cannot_grow(script: Any) -> None:
    with pytest.raises(ValueError, match="--layers 1: the model has 2 already"):
        script.grow(make_model(), 1)
    gpt = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(ValueError, match="give a model like Llama"):
        script.grow(gpt, 4)
