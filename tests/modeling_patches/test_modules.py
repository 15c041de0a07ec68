"""Finding the linear modules of a model by name, as PEFT does."""

import copy
import sys
from typing import Any

import multimodal
import pytest
from architectures import build
from conftest import Tiny
from peft import LoraConfig, get_peft_model
from transformers.pytorch_utils import Conv1D

from hf_spec.modeling_patches import modules
from hf_spec.modeling_patches.modules import (
    decoder_layers,
    linear_modules,
    mixers,
    mlps,
    output_projections,
)
from hf_spec.modeling_patches.weights import features


def test_default_is_all_linear_modules_of_the_layers(tiny: Tiny) -> None:
    found = linear_modules(tiny("llama"))
    kinds = {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    }  # fmt: skip
    assert set(found) == {f"model.layers.{i}.{kind}" for i in range(3) for kind in kinds}
    assert linear_modules(tiny("llama"), "all-linear") == found
    assert {type(m) for m in linear_modules(tiny("gpt2")).values()} == {Conv1D}


@pytest.mark.parametrize(
    "targets",
    [["q_proj", "v_proj"], ["lm_head"], ["layers.1.mlp.up_proj"], r".*\.[02]\..*_proj", "lm_head"],
)
def test_targets_are_those_of_peft(tiny: Tiny, targets: Any) -> None:
    """And modules that PEFT has wrapped keep their names."""
    model = copy.deepcopy(tiny("llama"))
    found = linear_modules(model, targets)
    peft_model = get_peft_model(model, LoraConfig(target_modules=targets))
    theirs = set(peft_model.base_model.targeted_module_names)
    assert set(found) == theirs and theirs
    assert linear_modules(model, targets) == found


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_prj"], r"no linear module of LlamaFor.* matches 'q_prj': .*q_pr"),
        (["q_proj", "embed_tokens"], "matches 'embed_tokens': "),  # no linear module
        (r"layers\..*", r"matches 'layers\\\\\.\.\*': "),  # not the whole name
        ([], "matches '': "),
        (".*(", r"'\.\*\(' is no regular expression: missing \)"),
        ("(" * 500 + ")" * 500, "is no regular expression: maximum recursion depth"),
        # Seconds for each name, twice as many for each two letters more.
        ("(.|..)+[A-Z]", r"takes longer than 0.05 seconds to .*a list of names"),
    ],
)
def test_targets_that_match_nothing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, targets: Any, message: str
) -> None:
    model, limit = tiny("llama"), sys.getrecursionlimit()
    monkeypatch.setattr(modules, "PATTERN_SECONDS", 0.05)
    sys.setrecursionlimit(1000)  # Python's own; libraries raise it
    try:
        with pytest.raises(ValueError, match=message):
            linear_modules(model, targets)
    finally:
        sys.setrecursionlimit(limit)


def test_encoders_have_no_targets() -> None:
    """Their layers have the same names, and are as many."""
    model, names = multimodal.build("smolvlm"), ["q_proj", "fc1"]
    assert len(model.model.vision_model.encoder.layers) == len(decoder_layers(model))
    assert all(name.startswith("model.text_model.layers") for name in linear_modules(model))
    assert any(name.endswith("vision_model.encoder.layers.0.self_attn.q_proj")
               for name, _ in model.named_modules())  # fmt: skip
    found = linear_modules(model, ["q_proj"])
    assert found and all(name.startswith("model.text_model.layers") for name in found)
    assert linear_modules(model, r".*q_proj") == found
    assert list(linear_modules(model, ["lm_head"])) == ["lm_head"]
    with pytest.raises(ValueError, match="matches 'fc1'"):
        linear_modules(model, names)


def test_routers_of_experts_are_no_linear_modules() -> None:
    """Phi-3.5-MoE's derives from one, but returns a choice as well."""
    model = build("phimoe")
    assert any("router" in name for name, m in model.named_modules() if features(m) is not None)
    assert not any("router" in name for name in linear_modules(model))


def test_output_projections(tiny: Tiny) -> None:
    """The last linear module of each layer; experts are left out."""
    last = {
        "llama": "mlp.down_proj",
        "gpt2": "mlp.c_proj",
        "opt": "fc2",
        "mixtral": "self_attn.o_proj",
    }
    for architecture, end in last.items():
        model = tiny(architecture)
        found = output_projections(model)
        assert len(found) == len(decoder_layers(model))
        assert all(name.endswith(end) for name in found)
        assert all(model.get_submodule(name) is module for name, module in found.items())
    model = copy.deepcopy(tiny("llama"))
    model.config.hidden_size = 7  # nothing has so many outputs
    with pytest.raises(ValueError, match=r"no linear module .* last of an attention or an MLP: na"):
        output_projections(model)


def test_layers_with_several_attentions() -> None:
    """LongCat-Flash: two attentions, two MLPs and experts in each of its layers, and a config that
    counts the attentions."""
    model = build("longcat_flash")
    layers = decoder_layers(model)
    assert len(layers) == model.config.num_layers == model.config.num_hidden_layers // 2
    for layer in layers:
        assert mixers(layer) == list(layer.self_attn) and len(mixers(layer)) == 2
        assert mlps(layer) == [layer.mlp, *layer.mlps] and len(mlps(layer)) == 3
    assert list(output_projections(model)) == [
        f"model.layers.{index}.mlps.1.down_proj" for index in range(len(layers))
    ]
