"""Adaptive trees: the likeliest paths, against a search that takes one path at a time."""

import heapq
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from adapter_oracle import Embeddings, added
from conftest import VOCAB, Tiny, ragged
from random_trees import paths_of
from running import drafting
from torch import Tensor

import hf_spec
from hf_spec.adapters.config import MARKOV_HEAD
from hf_spec.core.tree import Tree
from hf_spec.draft.grow import Frontier, grow
from hf_spec.draft.policy import DraftExit, ends_early, is_likely
from hf_spec.methods.registry import methods
from hf_spec.predict import table
from hf_spec.predict.markov import MarkovHead
from hf_spec.predict.table import Predictions, head_states
from hf_spec.target.hidden_states import output_logits

Path = tuple[int, ...]
HIDDEN, RANK = 5, 3


def example(
    batch: int, distances: int, vocab: int, with_markov_head: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, MarkovHead | None]:
    """Logits, states and roots of some rows; the Markov head changes their order."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    matrices = random(1, RANK, 4), random(1, HIDDEN, RANK), random(1, RANK, HIDDEN)
    weights = dict(zip(MARKOV_HEAD, matrices))
    base = Embeddings(random(vocab, 4), random(vocab, HIDDEN))
    roots = torch.randint(vocab, (batch,), generator=generator)
    logits, states = 1.5 * random(batch, distances, vocab), random(batch, distances, HIDDEN)
    return logits, states, roots, MarkovHead(weights, base) if with_markov_head else None


def naive(
    logits: Tensor, states: Tensor, root: int, markov_head: MarkovHead | None, count: int,
    depth: int,
) -> dict[Path, float]:  # fmt: skip
    """The likeliest paths of one row, best first, over the whole vocabulary."""
    found: dict[Path, float] = {}
    heap: list[tuple[float, Path]] = [(0.0, ())]
    while heap and len(found) <= count:
        cost, path = heapq.heappop(heap)
        found[path] = -cost
        if len(path) == depth:
            continue
        own = logits[len(path)]
        if markov_head is not None:
            before = torch.tensor(path[-1] if path else root)
            own = own + markov_head.logits(before[None], states[len(path)][None])[0]
        for token, log_p in enumerate(own.log_softmax(-1).tolist()):
            if log_p > -math.inf:
                heapq.heappush(heap, (cost - log_p, (*path, token)))
    found.pop(())
    return found


def found_in(tree: Tree, row: int) -> dict[Path, float]:
    """Log-probability of each candidate of a row by its path, likeliest first."""
    own = tree.host.rows(tree.row_sizes)[row]
    paths = {path: math.log(prob) for path, prob in paths_of(own).items()}
    assert len(paths) == len(own.parents), "one node per path"
    assert tree.depths[row, : len(paths)].tolist() == [*map(len, paths)]
    probs = tree.host.probs[row].tolist()
    assert probs == sorted(probs, reverse=True) and not any(probs[len(paths) :])
    assert paths.pop(()) == 0
    return paths


def grown(*args: Any) -> Tree:
    return Tree.unpacked(grow(*args))


def predict(
    logits: Tensor, count: int, known: Sequence[int] | None = None,
    markov_head: MarkovHead | None = None, states: Tensor | None = None,
) -> Predictions:  # fmt: skip
    known = [logits.shape[1]] * len(logits) if known is None else known
    return Predictions(logits, count, known, markov_head, states)


# -- growing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_markov_head", [False, True])
@pytest.mark.parametrize(
    ("distances", "vocab", "count", "depth"),
    [
        (3, 20, 8, 3),
        (3, 20, 8, 2),  # shallower than is known
        (3, 20, 8, 9),  # no deeper than is known
        (1, 20, 8, 1),
        (5, 20, 2, 5),  # fewer candidates than distances
        (4, 20, 1, 4),
        (3, 5, 40, 3),  # more candidates than tokens
        (2, 3, 40, 2),  # more candidates than there are paths
    ],
)
def test_the_likeliest_paths(
    distances: int, vocab: int, count: int, depth: int, with_markov_head: bool
) -> None:
    logits, states, roots, markov_head = example(4, distances, vocab, with_markov_head)
    tree = grown(predict(logits, count, None, markov_head, states), roots, count, depth)
    assert tree.tokens[:, 0].tolist() == roots.tolist()
    for row in range(4):
        rest = (int(roots[row]), markov_head, count, min(depth, distances))
        expected = naive(logits[row], states[row], *rest)
        found = found_in(tree, row)
        assert found.keys() == expected.keys()
        for path, log_p in found.items():
            # Tokens outside of a Markov head's shortlist are thought to have 1e-6 together.
            assert log_p == pytest.approx(expected[path], abs=1e-4)
        if markov_head is not None and count == 8 and distances == 3:  # it matters
            assert found.keys() != naive(logits[row], states[row], rest[0], None, *rest[2:]).keys()


@pytest.mark.parametrize("with_markov_head", [False, True])
def test_rows_that_know_less(with_markov_head: bool) -> None:
    """Each row has the tree that it has alone; one that knows nothing has its root."""
    logits, states, roots, markov_head = example(5, 3, 20, with_markov_head)
    known = (3, 0, 1, 2, 3)
    tree = grown(predict(logits, 8, known, markov_head, states), roots, 8, 3)
    assert tree.row_depths[1] == tree.row_sizes[1] == 0
    for row in range(5):
        some = slice(row, row + 1)
        alone = predict(logits[some], 8, known[some], markov_head, states[some])
        single = grown(alone, roots[some], 8, 3)
        found, expected = found_in(tree, row), found_in(single, 0)
        assert list(found) == list(expected)  # in the same order
        assert list(found.values()) == pytest.approx(list(expected.values()))
        assert max(map(len, found), default=0) <= known[row]
        rest = (int(roots[row]), markov_head, 8, known[row])
        assert found.keys() == naive(logits[row], states[row], *rest).keys()


def test_tokens_that_are_impossible() -> None:
    """Only what can come is a candidate; a row where all is said has padding."""
    logits = torch.full((2, 2, 9), -torch.inf)
    logits[0, :, 2:4] = torch.tensor([1.0, 0.5])
    logits[1, :, 5:8] = 0.0
    tree = grown(predict(logits, 8), torch.tensor([4, 4]), 8, 2)
    assert set(found_in(tree, 0)) == {(2,), (3,), (2, 2), (2, 3), (3, 2), (3, 3)}
    assert tree.row_sizes == (6, 8)
    assert set(found_in(tree, 1)) >= {(5,), (6,), (7,)}
    assert tree.valid[0].tolist() == [True] * 7 + [False] * 2


# -- in decoding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("with_markov_head", [False, True])
def test_trust_moves_all_tokens_of_a_distance(with_markov_head: bool) -> None:
    """As if the predictions had said so; no token becomes more than certain."""
    logits, states, roots, markov_head = example(2, 3, 20, with_markov_head)
    made = predict(logits, 20, None, markov_head, states)
    trust = [math.log(0.5), 0.0, math.log(0.25)]
    plain, moved = (grown(made, roots, 60, 3, one) for one in (None, trust))
    for row in range(2):
        before, after = found_in(plain, row), found_in(moved, row)
        both = before.keys() & after.keys()
        assert len(both) > 10 and {len(path) for path in both} >= {1, 2}
        for path in both:
            assert after[path] == pytest.approx(before[path] + sum(trust[: len(path)]), abs=1e-5)
        assert max(map(len, before)) >= max(map(len, after))
    certain = grown(made, roots, 8, 3, [50.0, 50.0, 50.0])
    assert certain.host.probs.max() == 1


@pytest.mark.parametrize("rank", [0, 4])
def test_drafts_are_the_likeliest_of_the_hidden_state(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(table, "SHORTLIST", VOCAB)  # the search below knows of none
    model = fresh("llama")
    config = hf_spec.MedusaConfig(num_heads=3, markov_rank=rank, draft_vocab_size=0)
    weights = added(model, config, std=0.5).tensors()
    drafter, checked = methods()["medusa"].drafter, []
    propose = drafter.propose

    def watched(self: Any, state: Any) -> Any:
        hidden = self.predictor.hidden
        tree = propose(self, state)
        markov_head, states = MarkovHead.of(weights, model), head_states(weights, hidden)
        if markov_head is not None:
            states = markov_head.given_root(states, state.root)
        logits = output_logits(model, states)
        for row in range(len(logits)):
            if not state.active[row]:
                continue
            room = min(3, state.max_depth)
            rest = (int(state.root[row]), markov_head, 6, room)
            expected = naive(logits[row].double(), states[row], *rest) if room > 0 else {}
            found = found_in(tree, row)
            assert found.keys() == expected.keys()
            checked.append(len(found))
        return tree

    monkeypatch.setattr(drafter, "propose", watched)
    with torch.no_grad():
        model.generate(
            **ragged(), max_new_tokens=12, do_sample=False,
            **drafting("medusa", num_draft_tokens=6),
        )  # fmt: skip
    assert checked.count(6) > 10


@pytest.mark.parametrize("name", ["exit", "likely"])
def test_finished_rows_have_no_say_in_how_deep_trees_grow(name: str) -> None:
    chances = torch.tensor([[0.9, 0.1], [1e-4, 1e-5], [0.5, 1e-3]])
    nodes = torch.zeros(3, 2, dtype=torch.long)
    frontier = Frontier(1, nodes, chances.log(), nodes, nodes)
    rule = is_likely if name == "likely" else DraftExit(3).rule(cost=0.1)
    for active, expected in (
        ([True, True, True], True), ([False, True, False], False), ([False, True, True], True),
    ):  # fmt: skip
        assert ends_early(active, rule)(frontier) is expected
