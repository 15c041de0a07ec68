"""ALiBi in tree forwards against plain forwards of every path alone."""

import pytest
import torch
from running import added, fingerprint
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, GPT2Config
from tree_oracle import (
    STALE,
    Decoding,
    additive,
    assert_same,
    expected,
    padded_prompt,
    random_tokens,
)

from modeling_patches.positions import needs_positions, tree_positions
from modeling_patches.support import check_model

TINY = {"vocab_size": 128, "hidden_size": 48, "initializer_range": 0.3}


def bloom(heads=4):
    return BloomConfig(n_head=heads, n_layer=2, **TINY)


#: The number of heads decides the slopes: with 12, not all are powers of two and rounding shows.
CASES = {"4 heads": bloom(), "12 heads": bloom(12)}


def build(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CASES[name]).eval()


def with_positions(model, changes):
    return tree_positions(model, changes).set


def without_patch(model, tokens):
    """Of a tree: an error, or logits that are wrong."""
    try:
        return Decoding(model).tree(tokens, lambda *_: None)
    except ValueError as error:
        return str(error)


@torch.no_grad()
def other_masks(model):
    ids, mask, positions = padded_prompt()
    return [
        model(ids, attention_mask=mask, position_ids=positions).logits,
        model(ids, use_cache=False).logits,
        Decoding(model).prefill,
    ]


@pytest.mark.parametrize("name", CASES)
def test_tree_logits_equal_plain_forwards_of_each_path(name):
    """And all other forwards are those of the model."""
    model = build(name)
    first, second = random_tokens(2, 7, seed=2), random_tokens(2, 7, seed=3)
    plain, failing, config = other_masks(model), without_patch(model, first), model.config.to_dict()
    prompts = Decoding(model).rows
    want = expected(model, prompts, first)
    assert isinstance(failing, str) or (failing - want).abs().max() > 0.1

    left = []
    for _ in range(2):
        with added(with_positions, model) as set_positions:
            decoding = Decoding(model)
            assert_same(decoding.tree(first, set_positions), want)
            decoding.accept(first, [[0, 1, 3, 6], [0, 2]])
            longer = decoding.rows
            two = decoding.tree(second, set_positions)
            assert all(map(torch.equal, other_masks(model), plain))
            # Token 999 is not in the vocabulary: the forward fails after the first changes ran.
            with pytest.raises(IndexError):
                Decoding(model).tree(torch.full((2, 7), 999), set_positions)
        assert_same(two, expected(model, longer, second))
        assert all(map(torch.equal, other_masks(model), plain))
        outside = without_patch(model, first)
        assert outside == failing if isinstance(failing, str) else torch.equal(outside, failing)
        left.append(fingerprint(model))
    assert left[0] == left[1] and model.config.to_dict() == config, "a second use adds nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_causal_4d_mask_gives_the_bits_of_a_2d_mask(name, dtype):
    """Positions of keys that nobody sees do not matter, though times a slope they are infinite in
    fp16."""
    model = build(name).to(dtype)
    ids, mask, positions = padded_prompt()
    causal = torch.ones(9, 9, dtype=torch.bool).tril() & mask[:, None, None].bool()
    with added(with_positions, model) as set_positions, torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        set_positions(positions, positions.masked_fill(mask == 0, STALE))
        got = model(ids, attention_mask=additive(causal, dtype)).logits
    assert torch.equal(got[mask.bool()], want[mask.bool()]) and want.isfinite().all()


def test_a_method_the_instance_had_still_runs():
    model, calls = build("4 heads"), []
    stock = model.transformer.build_alibi_tensor
    model.transformer.build_alibi_tensor = lambda *args, **kwargs: (
        calls.append(1) or stock(*args, **kwargs)
    )
    with added(with_positions, model):
        calls.clear()
        Decoding(model)
    Decoding(model)
    assert len(calls) == 2


def test_which_models_need_positions():
    def build(config):
        return AutoModelForCausalLM.from_config(config)

    def falcon(alibi):
        return build(FalconConfig(num_hidden_layers=1, num_attention_heads=4, alibi=alibi, **TINY))

    assert all(map(needs_positions, map(build, CASES.values())))
    gpt2 = build(GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2))
    for model in (gpt2, falcon(False)):
        assert not needs_positions(model)
        check_model(model)
    with pytest.raises(ValueError, match="FalconForCausalLM: its ALiBi counts slots"):
        check_model(falcon(True))
