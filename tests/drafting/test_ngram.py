"""Prompt lookup: chains against trees, other texts, and what confidence learns."""

from __future__ import annotations

import random

import pytest

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
