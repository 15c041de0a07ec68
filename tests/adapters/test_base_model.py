"""What adapters and answers record of their base model."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapter_oracle import randomise
from conftest import ARCHITECTURES, Tiny
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import hf_spec
from hf_spec.adapters.config import FACTS, facts_of, weights_digest

#: Where key-value heads are not 2: no grouped queries, or a single head.
KEY_VALUE_HEADS = {
    **dict.fromkeys(("gpt2", "gpt_neox", "opt", "gptj"), 4),
    "gpt_bigcode": 1,
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_facts_of_all_architectures(architecture: str) -> None:
    model_type, fields = ARCHITECTURES[architecture]
    if model_type in ("falcon", "gpt_neox", "opt"):  # have no such field, though it was given
        fields = {key: fields[key] for key in fields if key != "num_key_value_heads"}
    config = AutoConfig.for_model(model_type, **fields)
    values = (model_type, 32, 3, KEY_VALUE_HEADS.get(architecture, 2), 61)
    assert facts_of(SimpleNamespace(config=config)) == dict(zip(FACTS, values))


def test_a_model_without_a_config_has_no_facts() -> None:
    assert facts_of(nn.Linear(2, 2)) == facts_of(SimpleNamespace(config={})) == {}


def test_fingerprints_follow_the_weights(fresh: Tiny, tmp_path: Path) -> None:
    model = fresh()
    before = weights_digest(model)
    assert before is not None and len(before) == 16 and int(before, 16) >= 0
    assert weights_digest(fresh("mistral")) != before
    # Every parameter counts, and the strides of none.
    for name, parameter in model.named_parameters():
        changed = copy.deepcopy(model)
        changed.get_parameter(name).data.mul_(1.5)
        assert weights_digest(changed) != before, name
        if parameter.ndim == 2:
            changed.get_parameter(name).data = parameter.data.T.contiguous().T
            assert weights_digest(changed) == before
    # The entries that are read span the parameter.
    last = copy.deepcopy(model)
    last.lm_head.weight.data[-1] += 1
    assert weights_digest(last) != before
    model.save_pretrained(tmp_path)
    assert weights_digest(AutoModelForCausalLM.from_pretrained(tmp_path)) == before
    model.add_adapter(hf_spec.SpaceConfig(update="lora", rank=2))
    randomise(model, "SPACE")
    assert weights_digest(model) == before


class Packed(nn.Parameter):
    """As quantizers have them."""


def test_weights_that_cannot_be_read(fresh: Tiny) -> None:
    model = fresh()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = Packed(layer.weight.data)
    before = weights_digest(model)
    layer.weight.data.zero_()
    assert weights_digest(model) == before is not None
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    assert weights_digest(model) not in (None, before)
    assert weights_digest(model.to("meta")) is None
