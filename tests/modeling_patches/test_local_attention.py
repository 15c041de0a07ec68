"""GPT-Neo's local layers in tree forwards against plain forwards of every path alone."""

import pytest
import torch
from running import added, fingerprint
from transformers import GPTNeoConfig, GPTNeoForCausalLM
from tree_oracle import (
    Decoding,
    additive,
    assert_same,
    expected,
    padded_prompt,
    random_tokens,
)

from modeling_patches import local_attention
from modeling_patches.alibi import Positions


def tree_positions(model, changes):
    positions = Positions()
    local_attention.tree_positions(model, positions, changes)
    return positions.set


def build(layers=("global", "local", "local"), window=4, max_positions=20):
    """Two trees behind a prompt take 23 slots, but never more than 20 positions."""
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=128,
        hidden_size=48,
        num_layers=len(layers),
        num_heads=4,
        attention_types=[[[layer], 1] for layer in layers],
        window_size=window,
        max_position_embeddings=max_positions,
        initializer_range=0.3,
    )
    return GPTNeoForCausalLM(config).eval()


@pytest.fixture(params=[3, 4, 8], ids="window={}".format)
def model(request):
    return build(window=request.param)


def test_tree_logits_equal_plain_forwards_of_each_path(model):
    first, second = random_tokens(2, 7, seed=2), random_tokens(2, 7, seed=3)
    with added(tree_positions, model) as set_positions:
        decoding = Decoding(model)
        prompts = decoding.rows
        one = decoding.tree(first, set_positions)
        decoding.accept(first, [[0, 1, 3, 6], [0, 2]])
        longer = decoding.rows
        # 23 slots by now: more than the model has positions, which its triangle cannot cover.
        two = decoding.tree(second, set_positions)
    assert_same(one, expected(model, prompts, first))
    assert_same(two, expected(model, longer, second))


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


def test_the_window_matters(model):
    """Were it wider than the sequences, the tests here could not fail."""
    tokens = random_tokens(2, 7, seed=2)
    decoding = Decoding(model)
    wide = build(window=20)
    narrow = expected(model, decoding.rows, tokens)
    assert (narrow - expected(wide, decoding.rows, tokens)).abs().max() > 0.1


def test_unpatched_model_is_wrong(model):
    tokens = random_tokens(2, 7, seed=2)
    decoding = Decoding(model)
    got = decoding.tree(tokens, set_positions=lambda *_: None)
    assert (got - expected(model, decoding.rows, tokens)).abs().max() > 0.1


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


def test_a_method_the_instance_had_still_runs():
    model = build()
    attention = model.transformer.h[1].attn.attention
    own, calls = attention._attn, []

    def spy(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    attention._attn = spy
    with added(tree_positions, model) as set_positions:
        decoding = Decoding(model)
        assert len(calls) == 1
        decoding.tree(random_tokens(2, 7, seed=2), set_positions)
        assert len(calls) == 1
    Decoding(model)
    assert len(calls) == 2


def test_another_instance_is_not_touched(model):
    other = build()
    untouched = fingerprint(other)
    with added(tree_positions, model):
        assert fingerprint(other) == untouched


def test_applies_to_every_gpt_neo():
    assert local_attention.applies(build())
    assert local_attention.applies(build(layers=("global", "global")))
    assert frozenset({"gpt_neo"}) == local_attention.MODEL_TYPES
