"""Trees of a block with a Markov head, against scoring every path by itself."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from random_trees import path_to, paths_of

from hf_spec.core.shapes import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.draft.grow import grow, levels_of, ranked
from hf_spec.predict import blocks as predictions_module
from hf_spec.predict.block_heads import CONFIDENCE, BlockHead
from hf_spec.predict.blocks import HEADS, PathPredictions, with_confidence
from hf_spec.target.noise import TRUST

DISTANCES, HIDDEN, RANK, KNOWN = 3, 6, 4, 11
#: Tokens that are predicted.
IDS = torch.tensor([1, 4, 5, 8, 10])
KINDS = ["vanilla", "gated", "rnn", "selector"]


CONFIG = SimpleNamespace(markov_rank=RANK, hidden_size=HIDDEN, draft_vocab_size=len(IDS))


def head_of(kind: str, weights: dict[str, torch.Tensor]) -> BlockHead:
    adapter = SimpleNamespace(tensors=lambda: weights)
    return HEADS[kind](SimpleNamespace(config=CONFIG, adapter=adapter))


def made(
    kind: str, sure: int = 0, top_k: int | None = None
) -> tuple[BlockHead, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A head of random parameters, logits, states, and roots of two rows.

    Args:
        sure: features that a head of confidence reads; 0: there is none.
    """
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(one.shape, generator=generator)
        for name, one in HEADS[kind].fresh(CONFIG, KNOWN, None).items()
    }
    logits = torch.randn(2, DISTANCES, len(IDS), generator=generator)
    states = torch.randn(2, DISTANCES, HIDDEN, generator=generator)
    if sure:
        heads = torch.randn(1, sure, generator=generator) / 4, torch.tensor([1.0])
        weights |= dict(zip(CONFIDENCE, heads))
    head = head_of(kind, weights)
    head.top_k = top_k
    return head, logits, states, torch.tensor([3, 7])


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    ("kind", "sure", "top_k", "short"),
    [
        (kind, sure, None, short)
        for kind in KINDS for sure in (0, HIDDEN, HIDDEN + RANK) for short in (len(IDS), 3)
    ]
    + [("selector", 0, 4, len(IDS))],
)  # fmt: skip
def test_paths_have_their_own_probabilities(
    monkeypatch: pytest.MonkeyPatch, kind: str, sure: int, top_k: int | None, short: int,
    sampled: bool,
) -> None:  # fmt: skip
    """Of the tokens of a shortlist, beside others that keep their logits."""
    head, logits, states, root = made(kind, sure, top_k)
    monkeypatch.setattr(predictions_module, "SHORTLIST", short)
    noise = torch.zeros_like(logits)
    if sampled:
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    predictions = PathPredictions(
        logits, short, (DISTANCES, 2), head, states, IDS, noise if sampled else None
    )
    tree = Tree.unpacked(grow(predictions, root, 40, DISTANCES))
    for row, known in enumerate((DISTANCES, 2)):
        paths = {}
        for length in range(1, known + 1):
            plain, ahead = logits[row, None, :length], noise[row, None, :length]
            listed = (plain + ahead) >= (plain + ahead).topk(short).values[..., -1:]
            for path in product(IDS.tolist(), repeat=length):
                before = torch.tensor([[int(root[row]), *path[:-1]]])
                given = head.along(plain, before, states[row, None, :length])
                given = torch.where(listed, given, plain) + ahead
                own = (TRUST * given if sampled else given)[0].log_softmax(-1)
                if sure and not sampled:  # samples are what they are
                    confidence = head.confidence(before, states[row, None, :length])
                    order = own.masked_fill(~listed[0], -torch.inf).argsort(descending=True)
                    ranked = with_confidence(own.gather(-1, order), confidence[0])
                    own = torch.empty_like(own).scatter(-1, order, ranked)
                own = own.masked_fill(~listed[0], -torch.inf)
                places = [IDS.tolist().index(token) for token in path]
                found = float(sum(own[at, place] for at, place in enumerate(places)))
                if found > -torch.inf:
                    paths[path] = found
        likeliest = sorted(paths, key=lambda path: -paths[path])[:40]
        found = paths_of(tree.host.rows(tree.row_sizes)[row])
        del found[()]
        assert found.keys() == {*likeliest}
        for path, prob in found.items():
            assert prob == pytest.approx(torch.tensor(paths[path]).exp().item(), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_static_trees_take_tokens_by_rank(kind: str) -> None:
    head, logits, states, root = made(kind)
    trees = [TokenTree.from_paths([[0], [1], [0, 1], [1, 0], [1, 0, 2]]), TokenTree.chain(2)]
    predictions = PathPredictions(logits, 5, (3, 3), head, states, IDS)
    tokens = ranked(predictions, levels_of(tuple(trees), "cpu"), 3, root)
    for row, tree in enumerate(trees):
        for node in range(1, len(tree)):
            path = path_to(tree.parents, node)[1:]
            before = torch.tensor([[int(root[row]), *(int(tokens[row, one]) for one in path[:-1])]])
            length = len(path)
            given = head.along(logits[row, None, :length], before, states[row, None, :length])
            order = given[0, -1].argsort(descending=True)
            assert tokens[row, node] == IDS[order[tree.ranks[node]]]


def test_a_new_head_changes_nothing_and_unknown_tokens_are_the_last() -> None:
    for kind in KINDS:
        head, logits, states, root = made(kind)
        new = head_of(kind, HEADS[kind].fresh(CONFIG, KNOWN, None))
        assert torch.equal(new.given(logits[:, 0], root, states[:, 0])[0], logits[:, 0])
        more, last = torch.tensor([99, 99]), torch.tensor([KNOWN - 1, KNOWN - 1])
        found = [head.given(logits[:, 0], one, states[:, 0])[0] for one in (more, last)]
        assert torch.equal(*found)


def test_a_confidence_is_the_probability_of_the_likeliest() -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.1]]).log().expand(3, -1)  # 0.1 is of other tokens
    found = with_confidence(log_probs, torch.tensor([0.8, 0.0, 1.0])).exp()
    torch.testing.assert_close(found[0], torch.tensor([0.8, 0.12, 0.04]))
    # At the least, it stays the likeliest: as likely as the second, which has 0.6 of the rest.
    torch.testing.assert_close(found[1], torch.tensor([0.375, 0.375, 0.125]))
    assert found.isfinite().all() and (found[2, 0] > 0.999) and (found[2, 1:] > 0).all()
    overflowed = with_confidence(log_probs, torch.full((3,), torch.nan))
    assert overflowed.equal(with_confidence(log_probs, torch.zeros(3)))
    alone = with_confidence(torch.tensor([[-0.7]]), torch.tensor([0.25]))
    torch.testing.assert_close(alone.exp(), torch.tensor([[0.25]]))
