"""Models that count slots of the cache as positions are refused."""

from typing import Any

import pytest
from architectures import build
from conftest import Tiny
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, GPTNeoConfig

from modeling_patches.positions import needs_positions
from modeling_patches.support import check_model

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


def test_which_models_need_positions(tiny: Tiny) -> None:
    for name in ("falcon", "gpt2"):
        assert not needs_positions(tiny(name))
        check_model(tiny(name))
    assert all(needs_positions(build(name)) for name in ("llama4_text", "inkling_text", "whisper"))
