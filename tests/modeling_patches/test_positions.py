"""Positions in slots of the cache: ALiBi of Bloom, and what is refused."""

from typing import Any

import pytest
import torch
from conftest import Tiny, ragged
from running import added, fingerprint
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig

from modeling_patches.positions import needs_positions, tree_positions
from modeling_patches.support import check_model

#: Position of slots that nobody attends: times a slope, it is infinite in fp16.
STALE = 10**6
TINY = {"vocab_size": 61, "hidden_size": 48, "initializer_range": 0.3}


def bloom(heads: int) -> Any:
    torch.manual_seed(0)
    config = BloomConfig(n_head=heads, n_layer=2, **TINY)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [4, 12])  # 12: not all slopes are powers of two
@torch.no_grad()
def test_a_causal_4d_mask_gives_the_bits_of_a_2d_mask(heads: int, dtype: torch.dtype) -> None:
    """And other forwards stay as they are; a second use adds nothing to the model."""
    model = bloom(heads).to(dtype)
    ids, real = ragged((9, 5)).values()
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    seen = torch.ones(9, 9, dtype=torch.bool).tril() & real[:, None, None].bool()
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    want, left = model(ids, attention_mask=real).logits, []
    for _ in range(2):
        with added(tree_positions, model) as given:
            given.set(positions, {"": positions.masked_fill(real == 0, STALE)})
            got = model(ids, attention_mask=mask).logits
            assert torch.equal(model(ids, attention_mask=real).logits, want)
        assert torch.equal(got[real.bool()], want[real.bool()]) and want.isfinite().all()
        left.append(fingerprint(model))
    assert left[0] == left[1]


def test_a_method_the_instance_had_still_runs() -> None:
    model, calls = bloom(4), list[int]()
    stock = model.transformer.build_alibi_tensor
    model.transformer.build_alibi_tensor = lambda *args, **kwargs: (
        calls.append(1) or stock(*args, **kwargs)
    )
    for _ in range(2):
        with added(tree_positions, model):
            calls.clear()
            model(**ragged())
        assert len(calls) == 1


def test_which_models_need_positions(tiny: Tiny) -> None:
    assert needs_positions(tiny("bloom"))
    for name in ("falcon", "gpt2"):
        assert not needs_positions(tiny(name))
        check_model(tiny(name))
    config = FalconConfig(num_hidden_layers=1, num_attention_heads=4, alibi=True, **TINY)
    with pytest.raises(ValueError, match="FalconForCausalLM: its ALiBi counts slots"):
        check_model(AutoModelForCausalLM.from_config(config))
