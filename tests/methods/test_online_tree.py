"""ProPD's ``tree="online"``: hits counted as tokens come in, and trees of the likeliest ranks."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from adapter_oracle import Embeddings, randomise
from conftest import Tiny, check_same, prompt, ragged
from replay import RECORDED
from running import drafting

import hf_spec
from hf_spec import threads
from hf_spec.adapters.config import MARKOV_HEAD
from hf_spec.core.tree import Tree
from hf_spec.draft.grow import grow
from hf_spec.methods.propd import (
    GUESSED,
    HIT_ALPHA,
    RANKS,
    HitRates,
    OnlinePredictor,
    Ranked,
)
from hf_spec.predict.markov import MarkovHead
from hf_spec.predict.table import Predictions

ROW = {"input_ids": prompt()}

every_prediction = pytest.mark.parametrize("with_markov_head", [False, True])


def example(batch: int, depth: int, vocab: int, with_markov_head: bool) -> tuple[Predictions, Any]:
    """Predictions, and the roots that they stand behind."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, depth, vocab, generator=generator)
    states = torch.randn(batch, depth, 5, generator=generator)
    shapes = (1, 4, 5), (1, 5, 4), (1, 4, 5)
    matrices = (torch.randn(*shape, generator=generator) for shape in shapes)
    weights = dict(zip(MARKOV_HEAD, matrices))
    base = Embeddings(*(torch.randn(vocab, 5, generator=generator) for _ in range(2)))
    markov_head = MarkovHead(weights, base) if with_markov_head else None
    roots = torch.randint(vocab, (batch,), generator=generator)
    return Predictions(logits, vocab, [depth] * batch, markov_head, states), roots


def likeliest(made: Any, previous: torch.Tensor) -> torch.Tensor:
    """``(batch, distances, width)`` ids, likeliest first, given the token before each distance."""
    if made._head is None:
        return made.tokens
    found = made.given(previous[:, :, None])[:, :, 0]
    return made.tokens.gather(2, found.argsort(stable=True, dim=-1, descending=True))


# -- hits: 4.2.2 ----------------------------------------------------------------------


def test_hits_by_hand() -> None:
    rates = HitRates(2)
    table, counts = rates.cumulative.copy(), [GUESSED] * 2
    assert table[:, 1] == pytest.approx([0.55 + 0.1, 0.55 * 0.85 + 0.1])
    for distance, rank in [(1, 0), (2, 2), (1, RANKS), (2, 1), (1, 15)]:
        i = distance - 1
        counts[i] += 1
        alpha = max(1 / counts[i], HIT_ALPHA)
        for k in range(RANKS):
            table[i, k] = (1 - alpha) * table[i, k] + alpha * (rank <= k)
        rates.observe(distance, rank)
    np.testing.assert_allclose(rates.cumulative, table, rtol=1e-12)
    np.testing.assert_allclose(rates.chances.cumsum(1), table, rtol=1e-12)
    assert rates.counts.tolist() == counts


@every_prediction
def test_a_step_s_hits_one_token_at_a_time(with_markov_head: bool) -> None:
    """The rank of each token that came, given those before it."""
    made, roots = example(3, 4, 20, with_markov_head)
    seen: list[tuple[int, int]] = []
    hits: Any = HitRates(4)
    hits.observe = lambda distance, rank: seen.append((distance, rank))
    drafter = OnlinePredictor.__new__(OnlinePredictor)  # of no model
    drafter.hits, drafter._uncounted, drafter._chances = hits, [], roots
    drafter.markov_head = made._head
    came = [[3, 7, 1], [5, 5, 5, 5, 5, 5], []]
    given = (made.log_probs, made.states) if with_markov_head else ()
    drafter.learn_ranks(came, roots, made.tokens, *given)
    expected = []
    for row, tokens in enumerate(came):
        before = [int(roots[row]), *tokens]
        for d in range(min(4, len(tokens))):
            previous = torch.zeros(3, 4, dtype=torch.long)
            previous[row, d] = before[d]
            best = likeliest(made, previous)[row, d, :RANKS].tolist()
            expected.append((d + 1, best.index(tokens[d]) if tokens[d] in best else RANKS))
    assert seen == expected and len(seen) == 7


@every_prediction
def test_paths_count_by_the_chances_of_their_ranks(with_markov_head: bool) -> None:
    """The order of the tokens is the prediction's, also given the token before."""
    made, roots = example(2, 3, 20, with_markov_head)
    hits = HitRates(3)
    chances = hits.chances
    grown = Tree.unpacked(grow(Ranked(made, hits.chances_on(roots.device)), roots, 8, 3))
    assert grown.host is not None
    every = [path for d in (1, 2, 3) for path in itertools.product(range(8), repeat=d)]
    products = {path: math.prod(chances[d, rank] for d, rank in enumerate(path)) for path in every}
    paths = sorted(every, key=lambda path: -products[path])[:8]
    for row in range(2):
        found = grown.host.probs[row, 1:].tolist()
        assert found == pytest.approx([products[path] for path in paths])
        tokens, parents = grown.tokens[row].tolist(), grown.parents[row].tolist()
        seen: dict[int, tuple[int, ...]] = {}
        for node in range(1, 9):
            above = seen.get(parents[node], ())
            previous = torch.full((2, 3), tokens[parents[node]])
            best = likeliest(made, previous)[row, len(above)].tolist()
            seen[node] = (*above, best.index(tokens[node]))
        assert set(seen.values()) == set(paths)


def adapted(model: Any, **fields: Any) -> Any:
    """The model with an untrained adapter."""
    torch.manual_seed(2)
    model.add_adapter(hf_spec.ProPDConfig(**fields))
    return model


def generate(model: Any, inputs: dict[str, Any], way: Any = None, **options: Any) -> Any:
    """Statistics of a call whose output is that of plain generation."""
    spec = {**drafting("propd", tree="online", **options), **(way or {})}
    given = {**inputs, "max_new_tokens": 40}
    return check_same(model, {**spec, "return_dict_in_generate": True}, **given).spec_stats


def hits_of(model: Any) -> list[HitRates]:
    """What calls with a model have learned."""
    known = threads.memory(model)["learned"].values()
    return [one for one in known if isinstance(one, HitRates)]


def test_the_next_call_goes_on(fresh: Tiny) -> None:
    """From the hits of those before; another adapter has its own."""
    model = adapted(fresh())
    generate(model, ROW)
    (first,) = hits_of(model)
    counts = first.counts.copy()
    generate(model, ragged())
    assert hits_of(model) == [first] and first.counts[0] > counts[0] > GUESSED
    model.add_adapter(hf_spec.ProPDConfig(), "other")
    model.set_adapter("other")
    generate(model, ROW)
    assert len(hits_of(model)) == 2


def test_hits_are_counted_in_and_outside_of_inference_mode(fresh: Tiny) -> None:
    model = adapted(fresh())
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            generate(model, ROW)


@pytest.mark.parametrize("ranks", [2, 50, 1000])  # the vocabulary has fewer tokens
def test_options_of_the_paper(fresh: Tiny, ranks: int) -> None:
    """They reach the hits, and the output stays."""
    model = adapted(fresh())
    stats = generate(model, ROW, hit_alpha=0.25, hit_ranks=ranks)
    assert len(stats.details["online"]["hits"][0]) == ranks
    (hits,) = hits_of(model)
    assert (hits.alpha, hits.ranks) == (0.25, ranks)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("markov_rank", [0, 4])
def test_recorded_steps_learn_from_the_same(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, markov_rank: int
) -> None:
    """Trees may differ, as a program knows the hits of one step less."""
    model = adapted(fresh(), markov_rank=markov_rank)
    randomise(model, "PROPD")
    learn, found = OnlinePredictor.learn_ranks, []

    def noted(self: Any, emitted: Any, *made: torch.Tensor) -> None:
        seen[sum(map(len, texts))] = [one[0].clone() for one in made]
        texts.append(emitted[0])
        learn(self, emitted, *made)

    monkeypatch.setattr(OnlinePredictor, "learn_ranks", noted)
    for way in ({}, RECORDED, RECORDED):
        texts: list[list[int]] = []
        seen: dict[int, Any] = {}
        generate(model, ragged(), way)
        found.append(seen)
    same = found[0].keys() & found[2].keys()
    assert len(same) > 8
    for place in same:
        for eager, replayed in zip(found[0][place], found[2][place], strict=True):
            near = replayed[tuple(map(slice, eager.shape))]  # the last trees are less deep
            torch.testing.assert_close(near, eager, rtol=1e-4, atol=1e-4)
