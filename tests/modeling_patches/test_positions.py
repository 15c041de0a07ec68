"""Models that count slots of the cache as positions are refused."""

from typing import Any

import pytest
from architectures import build, random_model, tiny_config
from conftest import Tiny
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, GPTNeoConfig

from modeling_patches.support import check_length, check_model

TINY = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BloomConfig(n_head=4, **TINY), "BloomForCausalLM.forward takes no position_ids"),
        (FalconConfig(num_attention_heads=4, alibi=True, **TINY), "its ALiBi counts slots"),
        (
            GPTNeoConfig(attention_types=[[["local"], 1]], num_layers=1, num_heads=4, **TINY),
            "its local attention counts slots",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_slots_as_positions_are_refused(config: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_model(AutoModelForCausalLM.from_config(config))


def test_positions_that_a_call_may_give(tiny: Tiny) -> None:
    for name in ("falcon", "gpt2"):
        check_model(tiny(name))
    for name, reason in (("inkling_text", "its relative"), ("whisper", r"\.forward takes no pos")):
        with pytest.raises(ValueError, match=reason):
            check_model(build(name))


def test_how_far_a_scale_of_queries_by_slots_is_constant() -> None:
    config = tiny_config("llama4_text")
    model = random_model(config)
    check_length(model, 8192 // 2 - 64)
    with pytest.raises(ValueError, match=r"go up to 4032 tokens, .* make 4033\. Lower"):
        check_length(model, 8192 // 2 - 63)
    config.attn_temperature_tuning = False
    check_length(model, 10**6)
