"""A base model's fingerprint: the same for the same weights however they come, else another."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from conftest import ARCHITECTURES
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
)
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_spec
from hf_spec.adapters.base_model import ENTRIES, fingerprint

LORA: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 2}
EVERY_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def model(fresh: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return fresh("llama")


def test_looks(model: PreTrainedModel) -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", fingerprint(model) or "")


def test_models_differ(tiny: Callable[..., PreTrainedModel]) -> None:
    found = {name: fingerprint(tiny(name)) for name in ARCHITECTURES}
    assert None not in found.values() and len(set(found.values())) == len(ARCHITECTURES)


def test_every_parameter_counts(model: PreTrainedModel) -> None:
    """A change to any of them, of one entry in small ones, changes the fingerprint."""
    before = fingerprint(model)
    for name, parameter in model.named_parameters():
        saved = parameter.detach().clone()
        with torch.no_grad():
            if parameter.numel() <= ENTRIES:
                parameter.view(-1)[-1] += 1.0
            else:
                parameter.mul_(1.1)
        assert fingerprint(model) != before, name
        parameter.data.copy_(saved)
    assert fingerprint(model) == before


def test_the_entries_span_the_parameter(model: PreTrainedModel) -> None:
    """Any stretch of a parameter that is longer than its share has an entry that is read."""
    before = fingerprint(model)
    weight = model.lm_head.weight.data
    stretch = 2 * -(-weight.numel() // ENTRIES)
    for start in range(0, weight.numel() - stretch, stretch // 2):
        saved = weight.clone()
        weight.view(-1)[start : start + stretch] += 1.0
        assert fingerprint(model) != before, start
        weight.copy_(saved)


def test_the_size_of_the_vocabulary_counts(model: PreTrainedModel) -> None:
    before = fingerprint(model)
    model.resize_token_embeddings(model.config.vocab_size + 1)
    assert fingerprint(model) != before


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gpt2", "mixtral"])
def test_the_dtype_of_loading_does_not_matter(
    tiny: Callable[..., PreTrainedModel], tmp_path: Path, saved: torch.dtype, architecture: str
) -> None:
    copy.deepcopy(tiny(architecture)).to(saved).save_pretrained(tmp_path)
    found = {
        fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    assert found == {fingerprint(tiny(architecture))}


def test_another_process_finds_the_same(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    code = (
        "from transformers import AutoModelForCausalLM as M\n"
        "from hf_spec.adapters.base_model import fingerprint\n"
        f"print(fingerprint(M.from_pretrained({str(tmp_path)!r})))"
    )
    done = forks.run(code)
    assert done.stdout.split() == [fingerprint(model)], done.stderr


def test_strides_do_not_matter(model: PreTrainedModel) -> None:
    before = fingerprint(model)
    weight = model.lm_head.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous() and fingerprint(model) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_does_not_matter(model: PreTrainedModel) -> None:
    before = fingerprint(model)
    assert fingerprint(model.to("cuda")) == before
    assert fingerprint(model.to(torch.bfloat16)) == before


# ------------------------------------------------------------------------- adapters and wrappers


ADAPTERS = {
    "lora": LoraConfig(**LORA, target_modules=EVERY_LINEAR),
    "lora_embeddings": LoraConfig(**LORA, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "lora_head": LoraConfig(**LORA, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "lora_saved": LoraConfig(**LORA, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "lora_tokens": LoraConfig(**LORA, target_modules=["q_proj"], trainable_token_indices=[3, 5]),
    "tokens": TrainableTokensConfig(token_indices=[3, 4], target_modules=["embed_tokens"]),
    "ia3": IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "prompt_tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "layer_skip": hf_spec.LayerSkipConfig(skip_attention=[1]),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("architecture", ["llama", "llama_tied"])
def test_adapters_do_not_count(
    fresh: Callable[..., PreTrainedModel], architecture: str, adapter: str
) -> None:
    model = fresh(architecture)
    before = fingerprint(model)
    attached = get_peft_model(model, copy.deepcopy(ADAPTERS[adapter]))
    for name, parameter in attached.named_parameters():
        if parameter.requires_grad:  # trained, so that a tensor that is read by mistake shows
            torch.nn.init.normal_(parameter)
            assert "base_layer" not in name and "original_module" not in name
    assert fingerprint(attached) == before
    assert fingerprint(attached.get_base_model()) == before


def test_adapters_of_ours_with_weights_do_not_count(model: PreTrainedModel) -> None:
    """They hang under the base as ``spec_modules``, beside LoRA or alone."""
    from test_tuner import ToyConfig

    before = fingerprint(model)
    model.add_adapter(ToyConfig(), adapter_name="ours")
    assert any("spec_modules" in name for name, _ in model.named_parameters())
    assert fingerprint(model) == before
    model.add_adapter(LoraConfig(**LORA, target_modules=EVERY_LINEAR), adapter_name="lora")
    model.set_adapter(["ours", "lora"])
    assert fingerprint(model) == before
    model.disable_adapters()
    assert fingerprint(model) == before


def test_an_adapter_merged_into_the_weights_counts(model: PreTrainedModel) -> None:
    before = fingerprint(model)
    attached = get_peft_model(model, LoraConfig(**LORA, target_modules=["q_proj"]))
    assert isinstance(attached, PeftModel)
    torch.nn.init.normal_(attached.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default
                          .weight)  # fmt: skip
    assert fingerprint(attached) == before
    assert fingerprint(attached.merge_and_unload()) != before


def test_a_compiled_model(model: PreTrainedModel) -> None:
    assert fingerprint(torch.compile(model)) == fingerprint(model)


# ---------------------------------------------------------------- meta device and quantised weights


def test_weights_that_are_not_here(model: PreTrainedModel) -> None:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    assert fingerprint(empty) is None
    partly = copy.deepcopy(model)
    partly.lm_head = partly.lm_head.to("meta")
    assert fingerprint(partly) is None


def test_an_offloaded_model(model: PreTrainedModel) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert fingerprint(model) is None


def _as_int8(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.data.to(torch.int8), requires_grad=False)


def _as_float8(linear: nn.Linear) -> None:
    eight = linear.weight.data.to(torch.float8_e4m3fn)
    linear.weight = nn.Parameter(eight, requires_grad=False)


class Packed(nn.Parameter):
    """Says that it is bfloat16 and cannot be indexed, as some quantisers' parameters."""

    def __getitem__(self, *_: Any) -> Any:
        raise NotImplementedError("no indexing of packed weights")


def _as_subclass(linear: nn.Linear) -> None:
    linear.weight = Packed(linear.weight.data.to(torch.bfloat16), requires_grad=False)


@pytest.mark.parametrize("quantise", [_as_int8, _as_float8, _as_subclass])
def test_quantised_parameters_are_skipped(
    model: PreTrainedModel, quantise: Callable[[nn.Linear], None]
) -> None:
    """What stays in floating point still counts: embeddings, norms, the head."""
    whole = fingerprint(model)
    linears = [m for n, m in model.named_modules() if n.endswith("_proj")]
    assert len(linears) == 7 * model.config.num_hidden_layers
    for linear in linears:
        quantise(linear)
    found = fingerprint(model)
    assert found not in (None, whole)
    again = get_peft_model(
        copy.deepcopy(model), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=1)
    )
    assert fingerprint(again) == found
    linears[0].weight.data = torch.ones_like(linears[0].weight.data)
    assert fingerprint(model) == found
    model.model.norm.weight.data.mul_(2.0)
    assert fingerprint(model) != found


def test_torchs_own_quantisation(model: PreTrainedModel) -> None:
    from torch.ao.quantization import quantize_dynamic

    whole = fingerprint(model)
    with pytest.warns(DeprecationWarning):
        quantised = quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    found = fingerprint(quantised)
    assert found not in (None, whole)
    quantised.model.embed_tokens.weight.data.mul_(2.0)
    assert fingerprint(quantised) != found
