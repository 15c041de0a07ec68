"""ALiBi and local attention in tree forwards against plain forwards of every path alone."""

import pytest
import torch
from running import added, fingerprint
from transformers import (
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    MptConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from tree_oracle import (
    STALE,
    Decoding,
    additive,
    assert_same,
    expected,
    padded_prompt,
    random_tokens,
)

from modeling_patches import alibi, local_attention
from modeling_patches.alibi import Positions
from modeling_patches.attention_masks import PATCHES


def tree_positions(model, changes):
    positions = Positions()
    (patch,) = (patch for patch in PATCHES if patch.applies(model))
    patch.tree_positions(model, positions, changes)
    return positions.set


BLOOM = {"hidden_size": 48, "n_layer": 2, "initializer_range": 0.3}
FALCON = {"hidden_size": 48, "num_hidden_layers": 2, "alibi": True, "initializer_range": 0.3}
MPT = {"d_model": 48, "n_layers": 2, "max_seq_len": 64, "initializer_range": 0.3}


def neo(window=4, layers=("global", "local", "local")):
    """Two trees behind a prompt take 23 slots, but never more than 20 positions."""
    return GPTNeoConfig(
        vocab_size=128, hidden_size=48, num_layers=len(layers), num_heads=4, window_size=window,
        attention_types=[[[layer], 1] for layer in layers], max_position_embeddings=20,
        initializer_range=0.3,
    )  # fmt: skip


ALIBI = {
    "bloom": (BloomConfig(vocab_size=128, n_head=4, **BLOOM), "eager"),
    # The number of heads decides the slopes: with 12, not all are powers of two and rounding shows.
    "bloom-12-heads": (BloomConfig(vocab_size=128, n_head=12, **BLOOM), "eager"),
    "falcon-sdpa": (FalconConfig(vocab_size=128, num_attention_heads=4, **FALCON), "sdpa"),
    "falcon-eager": (FalconConfig(vocab_size=128, num_attention_heads=4, **FALCON), "eager"),
    "falcon-12-heads-groups": (
        FalconConfig(
            vocab_size=128,
            num_attention_heads=12,
            num_kv_heads=4,
            new_decoder_architecture=True,
            **FALCON,
        ),
        "sdpa",
    ),
    "falcon-sequential": (
        FalconConfig(
            vocab_size=128,
            num_attention_heads=4,
            multi_query=False,
            parallel_attn=False,
            **FALCON,
        ),
        "sdpa",
    ),
    "mpt": (MptConfig(vocab_size=128, n_heads=4, **MPT), "eager"),
    "mpt-12-heads-clipped": (
        MptConfig(vocab_size=128, n_heads=12, attn_config={"clip_qkv": 2.0}, **MPT),
        "eager",
    ),
}
LOCAL = {f"gpt_neo-{window}": (neo(window), "eager") for window in (3, 4, 8)}
CASES = {**ALIBI, **LOCAL}


def build(name):
    config, attention = CASES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.fixture(params=["bloom", "falcon-sdpa", "mpt", "gpt_neo-4"])
def model(request):
    """One of each kind of attention."""
    return build(request.param)


@pytest.mark.parametrize("name", CASES)
def test_tree_logits_equal_plain_forwards_of_each_path(name):
    model = build(name)
    first, second = random_tokens(2, 7, seed=2), random_tokens(2, 7, seed=3)
    with added(tree_positions, model) as set_positions:
        decoding = Decoding(model)
        prompts = decoding.rows
        one = decoding.tree(first, set_positions)
        decoding.accept(first, [[0, 1, 3, 6], [0, 2]])
        longer = decoding.rows
        # 23 slots by now: more than GPT-Neo has positions, which its triangle cannot cover.
        two = decoding.tree(second, set_positions)
    assert_same(one, expected(model, prompts, first))
    assert_same(two, expected(model, longer, second))


def test_unpatched_model_fails_or_is_wrong(model):
    tokens = random_tokens(2, 7, seed=2)
    decoding = Decoding(model)
    if model.config.model_type in ("mpt", "gpt_neo"):
        got = decoding.tree(tokens, set_positions=lambda *_: None)
        assert (got - expected(model, decoding.rows, tokens)).abs().max() > 0.1
    else:
        with pytest.raises(ValueError, match="too many values to unpack"):
            decoding.tree(tokens, set_positions=lambda *_: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in ALIBI if "mpt" not in name])
def test_a_causal_4d_mask_gives_the_bits_of_a_2d_mask(name, dtype):
    """Bloom and Falcon round ALiBi differently (Falcon always to bf16); each must stay itself.

    MPT counts from another slot than we do, which is the same only up to rounding.
    """
    model = build(name).to(dtype)
    ids, mask, positions = padded_prompt()
    causal = torch.ones(9, 9, dtype=torch.bool).tril() & mask[:, None, None].bool()
    with added(tree_positions, model) as set_positions, torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        set_positions(positions, positions)
        got = model(ids, attention_mask=additive(causal, dtype)).logits
    assert torch.equal(got[mask.bool()], want[mask.bool()])


@pytest.mark.parametrize("name", ["bloom", "falcon-sdpa", "falcon-eager"])
def test_stale_positions_do_not_overflow_half_precision(name):
    model = build(name).to(torch.float16)
    ids, mask, positions = padded_prompt()
    causal = torch.ones(9, 9, dtype=torch.bool).tril() & mask[:, None, None].bool()
    logits = []
    with added(tree_positions, model) as set_positions, torch.no_grad():
        for filler in (0, STALE):  # STALE times a slope is infinite in fp16
            set_positions(positions, positions.masked_fill(mask == 0, filler))
            logits.append(model(ids, attention_mask=additive(causal, torch.float16)).logits)
    assert torch.equal(logits[0][mask.bool()], logits[1][mask.bool()])
    assert logits[0][mask.bool()].isfinite().all()


def test_other_masks_run_the_original(model):
    ids, mask, positions = padded_prompt()

    def run():
        with torch.no_grad():
            return (
                model(ids, attention_mask=mask, position_ids=positions).logits,
                model(ids, use_cache=False).logits,
                Decoding(model).prefill,
            )

    want = run()
    with added(tree_positions, model) as set_positions:
        before = run()
        Decoding(model).tree(random_tokens(2, 7, seed=2), set_positions)
        after = run()
    for logits in (before, after, run()):
        assert all(torch.equal(got, plain) for got, plain in zip(logits, want))


def test_forwards_outside_are_as_before_and_a_second_use_adds_nothing(model):
    def outcome():
        """Of a tree without the patch: an error, or logits that are wrong in the model's way."""
        try:
            return Decoding(model).tree(random_tokens(2, 7, seed=2), lambda *_: None).tolist()
        except ValueError as error:
            return str(error)

    def use():
        with added(tree_positions, model) as set_positions:
            Decoding(model).tree(random_tokens(2, 7, seed=2), set_positions)

    config, before = model.config.to_dict(), outcome()
    use()
    once = fingerprint(model)
    assert outcome() == before
    use()
    # Token 999 is not in the vocabulary of 128: the forward fails after the first changes ran.
    with pytest.raises(IndexError), added(tree_positions, model) as set_positions:
        Decoding(model).tree(torch.full((2, 7), 999), set_positions)
    assert outcome() == before
    assert fingerprint(model) == once and model.config.to_dict() == config


@pytest.mark.parametrize("name", ["mpt", "gpt_neo-4"])
def test_a_method_the_instance_had_still_runs(name):
    model = build(name)
    if name == "mpt":
        attention, method = model.transformer.blocks[0].attn, "forward"
    else:
        attention, method = model.transformer.h[1].attn.attention, "_attn"
    own, calls = getattr(attention, method), []

    def spy(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    setattr(attention, method, spy)
    with added(tree_positions, model) as set_positions:
        decoding = Decoding(model)
        assert len(calls) == 1
        decoding.tree(random_tokens(2, 7, seed=2), set_positions)
        assert len(calls) == 1
    Decoding(model)
    assert len(calls) == 2


def test_applies():
    assert all(alibi.applies(build(name)) for name in ALIBI)
    assert all(local_attention.applies(build(name)) for name in LOCAL)
    every_layer_global = AutoModelForCausalLM.from_config(neo(layers=("global", "global")))
    assert local_attention.applies(every_layer_global)
    tiny = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert not alibi.applies(AutoModelForCausalLM.from_config(FalconConfig(alibi=False, **tiny)))
    assert not alibi.applies(
        GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2))
    )
    assert {"bloom", "falcon", "mpt"} == alibi.MODEL_TYPES
    assert frozenset({"gpt_neo"}) == local_attention.MODEL_TYPES


def test_positions_that_do_not_fit_the_mask_are_an_error(model):
    with added(tree_positions, model) as set_positions:
        with pytest.raises(ValueError, match=r"came with \[\] query and key"):
            Decoding(model).tree(random_tokens(2, 7, seed=2), lambda *_: None)
        set_positions(torch.zeros(2, 7).long(), torch.zeros(2, 15).long())
        with pytest.raises(ValueError, match=r"came with \[7, 15\] query and key"):
            Decoding(model).tree(random_tokens(2, 7, seed=2), lambda *_: None)
        ids, _, positions = padded_prompt()
        set_positions(positions, positions)
        with pytest.raises(ValueError, match=r"a torch\.bool mask .* must be additive"):
            model(ids, attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool))


# -- local attention -----------------------------------------------------------------------------


def test_the_band_is_a_double_loop_over_queries_and_keys():
    generator = torch.Generator().manual_seed(0)
    queries = torch.randint(0, 12, (2, 5), generator=generator)
    keys = torch.randint(0, 12, (2, 9), generator=generator)
    visible = torch.rand(2, 1, 5, 9, generator=generator) < 0.7
    got = local_attention.banded(additive(visible), queries, keys, window=4) == 0
    for row in range(2):
        for i, query in enumerate(queries[row].tolist()):
            for j, key in enumerate(keys[row].tolist()):
                near = query - key < 4
                assert got[row, 0, i, j] == (near and bool(visible[row, 0, i, j]))


@pytest.mark.parametrize("name", LOCAL)
def test_the_window_matters(name):
    """Were it wider than the sequences, the tests here could not fail."""
    tokens, model = random_tokens(2, 7, seed=2), build(name)
    decoding = Decoding(model)
    wide = AutoModelForCausalLM.from_config(neo(20)).eval()
    wide.load_state_dict(model.state_dict(), strict=False)
    narrow = expected(model, decoding.rows, tokens)
    assert (narrow - expected(wide, decoding.rows, tokens)).abs().max() > 0.1
