"""ALiBi and local attention in tree forwards against plain forwards of every path alone."""

import pytest
import torch
from running import added, fingerprint
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoConfig,
    MptConfig,
)
from tree_oracle import (
    STALE,
    Decoding,
    additive,
    assert_same,
    expected,
    padded_prompt,
    random_tokens,
)

from modeling_patches.given_positions import Positions
from modeling_patches.positions import needs_positions, tree_positions

TINY = {"vocab_size": 128, "hidden_size": 48, "initializer_range": 0.3}


def bloom(heads=4):
    return BloomConfig(n_head=heads, n_layer=2, **TINY)


def falcon(heads=4, **fields):
    settings = {"alibi": True, "num_attention_heads": heads, "num_hidden_layers": 2}
    return FalconConfig(**TINY, **settings | fields)


def mpt(heads=4, **fields):
    settings = {"vocab_size": 128, "d_model": 48, "n_layers": 2, "max_seq_len": 64}
    return MptConfig(n_heads=heads, initializer_range=0.3, **settings, **fields)


def neo(window=4, layers=("global", "local", "local")):
    """Two trees behind a prompt take 23 slots, but never more than 20 positions."""
    return GPTNeoConfig(
        num_layers=len(layers), num_heads=4, window_size=window, max_position_embeddings=20,
        attention_types=[[[layer], 1] for layer in layers], **TINY,
    )  # fmt: skip


#: The number of heads decides the slopes: with 12, not all are powers of two and rounding shows.
CASES = {
    "bloom": (bloom(), "eager"),
    "bloom-12-heads": (bloom(12), "eager"),
    "falcon-sdpa": (falcon(), "sdpa"),
    "falcon-eager": (falcon(), "eager"),
    "falcon-12-heads": (falcon(12, num_kv_heads=4, new_decoder_architecture=True), "sdpa"),
    "falcon-sequential": (falcon(multi_query=False, parallel_attn=False), "sdpa"),
    "mpt": (mpt(), "eager"),
    "mpt-12-heads-clipped": (mpt(12, attn_config={"clip_qkv": 2.0}), "eager"),
    "gpt_neo-3": (neo(3), "eager"),
    "gpt_neo-8": (neo(8), "eager"),
}


def build(name):
    config, attention = CASES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def with_positions(model, changes):
    positions = Positions()
    tree_positions(model, positions, changes)
    return positions.set


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
            # 23 slots by now: more than GPT-Neo has positions, which its triangle cannot cover.
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
@pytest.mark.parametrize("name", [name for name in CASES if name[:3] in ("blo", "fal")])
def test_a_causal_4d_mask_gives_the_bits_of_a_2d_mask(name, dtype):
    """Bloom and Falcon round ALiBi differently (Falcon always to bf16); each must stay itself.

    MPT counts from another slot than we do, which is the same only up to rounding. Positions of
    keys that nobody sees do not matter, though times a slope they are infinite in fp16.
    """
    model = build(name).to(dtype)
    ids, mask, positions = padded_prompt()
    causal = torch.ones(9, 9, dtype=torch.bool).tril() & mask[:, None, None].bool()
    with added(with_positions, model) as set_positions, torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        set_positions(positions, positions.masked_fill(mask == 0, STALE))
        got = model(ids, attention_mask=additive(causal, dtype)).logits
    assert torch.equal(got[mask.bool()], want[mask.bool()]) and want.isfinite().all()


@pytest.mark.parametrize("name", ["mpt", "gpt_neo-3"])
def test_a_method_the_instance_had_still_runs(name):
    model, calls = build(name), []
    if name == "mpt":
        attention, method = model.transformer.blocks[0].attn, "forward"
    else:
        attention, method = model.transformer.h[1].attn.attention, "_attn"
    stock = getattr(attention, method)
    setattr(attention, method, lambda *args, **kwargs: calls.append(1) or stock(*args, **kwargs))
    with added(with_positions, model):
        Decoding(model)
    Decoding(model)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["bloom", "falcon-sdpa", "mpt", "gpt_neo-3"])
def test_positions_that_do_not_fit_the_mask_are_an_error(name):
    model = build(name)
    with added(with_positions, model) as set_positions:
        with pytest.raises(ValueError, match=r"came with \[\] query and key"):
            Decoding(model).tree(random_tokens(2, 7, seed=2), lambda *_: None)
        set_positions(torch.zeros(2, 7).long(), torch.zeros(2, 15).long())
        with pytest.raises(ValueError, match=r"came with \[7, 15\] query and key"):
            Decoding(model).tree(random_tokens(2, 7, seed=2), lambda *_: None)
        ids, _, positions = padded_prompt()
        set_positions(positions, positions)
        with pytest.raises(ValueError, match=r"a torch\.bool mask .* must be additive"):
            model(ids, attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool))


def test_which_models_need_positions():
    def needed(config):
        return needs_positions(AutoModelForCausalLM.from_config(config))

    assert all(needed(config) for config, _ in CASES.values())
    assert needed(neo(layers=("global", "global")))
    assert not needed(falcon(alibi=False))
    assert not needed(GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2))
