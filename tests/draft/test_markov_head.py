"""Predictions and Markov heads against loops over single tokens."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from adapter_oracle import Embeddings, Opaque
from torch import Tensor

from hf_spec.adapters.config import MARKOV_HEAD, VOCABULARY
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.shapes import TokenTree
from hf_spec.draft.grow import levels_of, ranked
from hf_spec.predict.losses import NEVER, Ahead, Own, future_losses
from hf_spec.predict.markov import MarkovHead
from hf_spec.predict.table import SHORTLIST, Predictions
from hf_spec.target.noise import TRUST
from hf_spec.target.sequences import IGNORED

BATCH, DISTANCES, HIDDEN, WIDTH, RANK = 2, 3, 5, 6, 4
ROOTS = torch.tensor([11, 12])

with_and_without = pytest.mark.parametrize("with_markov_head", [False, True])


class Example:
    """Random predictions of a vocabulary, with a Markov head that matters."""

    def __init__(self, vocab: int, dtype: torch.dtype = torch.float64, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.vocab = vocab
        self.logits = 2 * random(BATCH, DISTANCES, vocab)
        self.states = random(BATCH, DISTANCES, HIDDEN)
        count = 1 + DISTANCES
        shapes = (count, RANK, WIDTH), (count, HIDDEN, RANK), (count, RANK, HIDDEN)
        self.weights = dict(zip(MARKOV_HEAD, (random(*shape) for shape in shapes)))
        self.base: Any = Embeddings(random(vocab, WIDTH), random(vocab, HIDDEN))
        self.markov_head = MarkovHead(self.weights, self.base)
        self.previous = torch.randint(vocab, (BATCH, 6), generator=generator)

    def bias(self, row: int, distance: int, previous: int) -> Tensor:
        """``(vocab,)`` that the token before adds to the logits."""
        return self.base.out.weight @ self.change(0, previous, self.states[row, distance - 1])

    def change(self, index: int, token: int, state: Tensor) -> Tensor:
        """``(hidden,)`` by the formula, one number at a time.

        Args:
            index: 0 for the token before, d for the root at distance d.
            token: that token.
            state: ``(hidden,)``
        """
        embedding, output, projection = (self.weights[name][index] for name in MARKOV_HEAD)
        projected = projection @ state
        vector = self.base.into.weight[token].detach()
        vector = vector / math.sqrt(sum(float(x) ** 2 for x in vector) / WIDTH)
        inner = [embedding[r] @ vector + projected[r] for r in range(RANK)]
        inner = [x / (1 + (-x).exp()) for x in inner]
        return torch.stack([output[:, r] * inner[r] for r in range(RANK)]).sum(0)

    def predictions(
        self, width: int, with_markov_head: bool = True, noise: Tensor | None = None
    ) -> Predictions:
        chosen, known = self.markov_head if with_markov_head else None, [DISTANCES] * BATCH
        return Predictions(self.logits, width, known, chosen, self.states, noise=noise)


def places() -> list[tuple[int, int]]:
    return list(product(range(BATCH), range(1, DISTANCES + 1)))


@pytest.mark.parametrize("embeddings", ["plain", "opaque", "biased"])
def test_the_bias_given_the_token_before(embeddings: str) -> None:
    """Of all tokens, and of a few. The output embeddings' own bias is no part of it."""
    case = Example(23)
    tokens, previous = case.logits.topk(7, dim=-1).indices, case.previous.view(BATCH, DISTANCES, 2)
    expected = torch.empty(BATCH, DISTANCES, 2, 23, dtype=torch.float64)
    for (row, distance), n in product(places(), range(2)):
        at = row, distance - 1, n
        expected[at] = case.bias(row, distance, int(previous[at]))
    if embeddings != "plain":
        bias = torch.arange(23.0, dtype=torch.float64) if embeddings == "biased" else None
        case.base.out = Opaque(case.base.out, bias)
    head = MarkovHead(case.weights, case.base)
    torch.testing.assert_close(head.logits(previous, case.states[:, :, None]), expected)
    shortlist = expected.gather(3, tokens[:, :, None].expand(-1, -1, 2, -1))
    torch.testing.assert_close(head.bias(previous, case.states, tokens), shortlist)


@pytest.mark.parametrize("depth", [1, DISTANCES])
def test_states_given_the_root(depth: int) -> None:
    case = Example(23)
    states = case.states[:, :depth]
    expected = states.clone()
    for row, distance in product(range(BATCH), range(1, depth + 1)):
        state = expected[row, distance - 1]
        state += case.change(distance, int(ROOTS[row]), state)
    torch.testing.assert_close(case.markov_head.given_root(states, ROOTS), expected)
    half = states.to(torch.bfloat16)
    exact = case.markov_head.given_root(half.double(), ROOTS)
    found = case.markov_head.given_root(half, ROOTS)
    assert found.dtype == torch.bfloat16
    # Two roundings of bfloat16: of the change, and of the sum.
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("vocab", [SHORTLIST - 3, 3 * SHORTLIST])
def test_tokens_outside_of_the_shortlist_keep_their_chance_together(
    vocab: int, sampled: bool
) -> None:
    """Of the whole vocabulary, it is the softmax of the logits with the bias added; with the noise
    that tokens will be sampled with, of what sampling makes of these."""
    case, trust, noise = Example(vocab), 1.0, None
    if sampled:
        drawn = torch.empty_like(case.logits)
        drawn.exponential_(generator=torch.Generator().manual_seed(2))
        trust, noise = TRUST, -drawn.log()
    predictions = case.predictions(8, noise=noise)
    assert predictions.tokens.shape == (BATCH, DISTANCES, min(vocab, SHORTLIST))
    whole = predictions.given(case.previous[:, None].expand(-1, DISTANCES, -1))
    for row, distance in places():
        found = whole[row, distance - 1]
        tokens = predictions.tokens[row, distance - 1]
        logits = case.logits if noise is None else case.logits + noise
        plain = (trust * logits[row, distance - 1]).softmax(-1)
        torch.testing.assert_close(predictions.log_probs[row, distance - 1].exp(), plain[tokens])
        for n, previous in enumerate(case.previous[row].tolist()):
            weighed = plain[tokens] * (trust * case.bias(row, distance, previous)[tokens]).exp()
            expected = weighed / (weighed.sum() + 1 - plain[tokens].sum())
            # Tokens outside of the shortlist are thought to have 1e-6 together at least.
            torch.testing.assert_close(found[n].exp(), expected, rtol=1e-4, atol=1e-6)
            assert 0 < found[n].exp().sum() < 1 + 1e-9


TREES = [
    TokenTree.from_paths([[0], [1], [0, 2], [1, 0], [1, 0, 4], [1, 0, 0]]),
    TokenTree.from_paths([[3], [3, 0]]),
]


@with_and_without
@pytest.mark.parametrize("trees", [TREES, TREES[::-1], TREES[:1] * 2])
def test_tokens_on_the_nodes_of_trees(trees: list[TokenTree], with_markov_head: bool) -> None:
    case = Example(23)
    found = ranked(case.predictions(5, with_markov_head), levels_of(tuple(trees), "cpu"), 3, ROOTS)
    assert found.shape == (BATCH, max(map(len, trees)))
    for row, tree in enumerate(trees):
        tokens = [int(ROOTS[row])]
        for node in range(1, len(tree)):
            distance = tree.depths[node]
            logits = case.logits[row, distance - 1]
            if with_markov_head:
                logits = logits + case.bias(row, distance, tokens[tree.parents[node]])
            order = logits.argsort(descending=True).tolist()
            tokens.append(order[tree.ranks[node]])
        assert found[row, : len(tree)].tolist() == tokens


@pytest.mark.parametrize("drafted", ["all", "some", "some, trained"])
@pytest.mark.parametrize("distilled", [False, True])
@with_and_without
def test_losses_of_single_predictions(
    with_markov_head: bool, distilled: bool, drafted: str
) -> None:
    """At the anchor a the model itself gives token a + 1; distance d asks for a + 1 + d, given
    a + d, the one before it. With a draft vocabulary all distributions are those of its tokens."""
    case, length, vocab = Example(9), 8, 9
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (BATCH, length), generator=generator)
    anchors = torch.tensor([[0, 3], [4, 6]])
    shape = (BATCH, 2, DISTANCES)
    own = torch.randn(*shape, vocab, generator=generator, dtype=torch.float64)
    states = torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64)
    wanted = torch.full(shape, IGNORED)
    for row, n, distance in product(range(BATCH), range(2), range(1, DISTANCES + 1)):
        at = int(anchors[row, n]) + 1 + distance
        if at < length:
            wanted[row, n, distance - 1] = ids[row, at]
    tokens = torch.arange(vocab) if drafted == "all" else torch.tensor([0, 2, 3, 5, 7])
    weights = dict(case.weights) if with_markov_head else {}
    if drafted != "all":
        weights[VOCABULARY] = tokens
    case.base.out.requires_grad_(drafted == "some, trained")
    own = own[..., tokens]
    heads = list[Any]()

    def predict(states: Tensor, head: Any) -> Tensor:
        heads.append(head)
        found: Tensor = (head or case.base.out)(states)
        return found

    ahead = Ahead.of(TrainingBatch(ids, ids, anchors), DISTANCES, ids.device)
    assert torch.equal(ahead.wanted, wanted)
    losses, made, labels = future_losses(
        case.base, weights, states, ahead, Own(own.softmax(-1)) if distilled else None, predict
    )
    assert [head is None for head in heads] == [drafted != "some"]

    def loss(scores: Tensor, token: int, target: Tensor) -> Tensor:
        if not distilled:
            return -scores.log_softmax(-1)[token]
        p = target.log_softmax(-1)
        return (p.exp() * (p - scores.log_softmax(-1))).sum()

    for row, n, distance in product(range(BATCH), range(2), range(1, DISTANCES + 1)):
        at = (row, n, distance - 1)
        token, state, start = int(wanted[at]), states[at], int(anchors[row, n])
        if token == IGNORED or token not in tokens:
            assert losses[at] == 0
            assert labels[at] == (IGNORED if token == IGNORED else NEVER)
            continue
        place = tokens.tolist().index(token)
        assert labels[at] == place
        if with_markov_head:
            state = state + case.change(distance, int(ids[row, start + 1]), state)
        scores = case.base.out(state)[tokens]
        expected = loss(scores, place, own[at])
        if with_markov_head:
            change = case.change(0, int(ids[row, start + distance]), state)
            scores = scores + (case.base.out.weight @ change)[tokens]
            expected = MarkovHead.plain_share * expected + loss(scores, place, own[at])
        torch.testing.assert_close(losses[at], expected)
        torch.testing.assert_close(made[at], scores)
    assert (wanted == IGNORED).any() and (labels >= 0).sum() > 3
    if drafted == "some, trained":
        losses.sum().backward()
        assert case.base.out.weight.grad.any()
