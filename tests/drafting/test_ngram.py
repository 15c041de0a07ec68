"""Looked-up candidates merged into another strategy's draft."""

from __future__ import annotations

import random

import pytest
import torch
from running import drafting

import hf_spec
from hf_spec.drafting.ngram import (
    Confidence,
    NgramIndex,
    continuation_chain,
    continuation_tree,
)


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_is_the_likeliest_path_of_the_tree(seed: int) -> None:
    """Each of its tokens is the likeliest of its siblings, as likely as the tree says."""
    rng = random.Random(seed)
    tokens = [rng.randrange(3) for _ in range(rng.randint(4, 40))]
    index, confidence = NgramIndex(1, 3), Confidence()
    index.update(tokens)
    confidence.observe(2, rng.randrange(3), 3)
    matches = index.matches(tokens, 6)
    parents, candidates, probs = continuation_tree(tokens, matches, 5, 10**6, confidence)
    chain = continuation_chain(tokens, matches, 5, confidence)
    node, found = 0, []
    while below := [n for n, parent in enumerate(parents) if parent == node]:
        node = max(below, key=probs.__getitem__)
        found.append((candidates[node], probs[node]))
    assert [prob for _, prob in found] == pytest.approx(chain[1])
    likeliest = all(a != b for a, b in zip(sorted(probs), sorted(probs)[1:]))
    assert not likeliest or [token for token, _ in found] == chain[0]
    least = continuation_chain(tokens, matches, 5, confidence, 0.2)
    assert least[1] == [chance for chance in chain[1] if chance >= 0.2]


def test_other_texts_are_looked_up_in() -> None:
    texts = [1, 2, 3, 4, -1, 9, 2, 3, -1]  # each with a negative token behind it
    index = NgramIndex(1, 2)
    index.update(texts)
    matches = index.matches([7, 2, 3], 8, same=False)
    assert matches == [(8, 2), (3, 2)]
    assert continuation_chain(texts, matches, 4, Confidence())[0] == [4]
    assert index.matches([7] * 6 + [2, 3], 8, same=False)[0] == (8, 2), "not taken for its own end"


def test_confidence_starts_from_what_others_have_shown() -> None:
    prior = Confidence()
    one = Confidence(prior)
    assert one.first(3) == prior.first(3) == 0.5 and one.deeper == prior.deeper
    for _ in range(98):
        one.observe(3, 4, 4)
    assert prior.first(3) == pytest.approx(99 / 100) and one.first(3) > 0.99
    other = Confidence(prior)
    assert other.first(3) == prior.first(3) and other.first(2) == 0.5
    assert other.deeper == pytest.approx(prior.deeper) and prior.deeper > 0.99
    other.observe(3, 0, 4)
    assert other.first(3) < prior.first(3), "it learns for itself, and the others a little"


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_layer_skip_with_retrieval_equals_plain(tiny, penalty: float) -> None:
    model = tiny("llama")
    ids = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    ids[:, 6:] = ids[:, :6]  # something to look up
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    common = {
        "attention_mask": mask,
        "max_new_tokens": 40,
        "do_sample": False,
        "repetition_penalty": penalty,
    }
    plain = model.generate(ids, **common)
    for lookup in (False, True):
        options = {"skip_mlp": [1], "lookup": lookup}
        ours = model.generate(ids, **common, **drafting("layer_skip", **options))
        assert torch.equal(plain, ours)
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


def test_sampling_with_merged_candidates_keeps_the_distribution(tiny) -> None:
    """Chi-square of the second and third token at p < 1e-6: one false alarm in a million seeds."""
    scipy_free_critical = 4.9  # normal quantile of 1 - 5e-7, for the Wilson-Hilferty approximation
    model = tiny("llama")
    ids = torch.tensor([[5, 9, 7, 11, 5, 9, 7, 11, 5, 9, 7, 11]])
    common = {"do_sample": True, "temperature": 0.8, "top_k": 4, "max_new_tokens": 3}
    torch.manual_seed(0)
    drawn = model.generate(
        ids, num_return_sequences=4000, **common,
        **drafting("layer_skip", skip_mlp=[1], lookup=True),
    )[:, 12:]  # fmt: skip
    assert hf_spec.last_stats(model).accepted.get(1, 0) > 100, "candidates must have been accepted"
    expected = exact_law(model, ids, drawn.shape[1], temperature=0.8, top_k=4)
    counts: dict[tuple[int, ...], int] = {}
    for row in drawn.tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    assert set(counts) <= set(expected), "a sequence of probability 0 was drawn"
    cells, rest, rest_count = [], 0.0, 0
    for key, probability in expected.items():
        if probability * 4000 >= 5:
            cells.append((probability * 4000, counts.get(key, 0)))
        else:
            rest += probability * 4000
            rest_count += counts.get(key, 0)
    if rest:
        cells.append((rest, rest_count))
    chi2 = sum((count - mean) ** 2 / mean for mean, count in cells)
    df = len(cells) - 1
    z = ((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5
    assert z < scipy_free_critical


@torch.no_grad()
def exact_law(model, ids, length: int, temperature: float, top_k: int) -> dict:
    """Probability of every continuation, by plain forwards; a row that met EOS goes on with pad."""
    eos = model.generation_config.eos_token_id
    eos = {eos} if isinstance(eos, int) else set(eos or ())
    pad = model.generation_config.pad_token_id
    law = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for path, probability in law.items():
            if eos & set(path):
                grown[(*path, pad)] = grown.get((*path, pad), 0.0) + probability
                continue
            prefix = torch.cat([ids, torch.tensor([path], dtype=torch.long)], 1)
            top = (model(prefix).logits[0, -1].float() / temperature).topk(top_k)
            for token, p in zip(top.indices.tolist(), top.values.softmax(-1).tolist()):
                grown[(*path, token)] = probability * p
        law = grown
    return law
