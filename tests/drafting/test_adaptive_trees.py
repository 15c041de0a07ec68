"""Adaptive trees: the likeliest paths, against a search that takes one path at a time."""

import heapq
import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_oracle import Embeddings, randomise
from conftest import VOCAB, Tiny, prompt, ragged
from torch import Tensor

import hf_spec
from hf_spec.adapters.predicting import MARKOV_HEAD
from hf_spec.core.tree import Tree
from hf_spec.drafting import predictions
from hf_spec.drafting.grow import grow
from hf_spec.drafting.growth import GrowingDrafter
from hf_spec.drafting.heads import head_states
from hf_spec.drafting.markov_head import MarkovHead
from hf_spec.drafting.predictions import Predictions
from hf_spec.drafting.state import DecodeState, Grown
from hf_spec.methods.registry import methods
from hf_spec.model.hidden_states import output_logits
from hf_spec.policy.plans import best_ends, ends

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


def paths_of(tree: Tree, row: int) -> dict[Path, float]:
    """Log-probability of each candidate of a row by its path; 0 if the tree has none."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    paths: list[Path] = [()]
    for node in range(1, tree.row_sizes[row] + 1):
        assert parents[node] < node
        paths.append((*paths[parents[node]], tokens[node]))
        assert tree.depths[row, node] == len(paths[-1])
    assert len(set(paths)) == len(paths)
    if tree.host is None:
        return dict.fromkeys(paths[1:], 0.0)
    probs = tree.host.probs[row].tolist()
    assert probs == sorted(probs, reverse=True)
    assert probs[0] == 1 and not any(probs[len(paths) :])
    return dict(zip(paths[1:], map(math.log, probs[1 : len(paths)])))


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
        found = paths_of(tree, row)
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
        found, expected = paths_of(tree, row), paths_of(single, 0)
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
    assert set(paths_of(tree, 0)) == {(2,), (3,), (2, 2), (2, 3), (3, 2), (3, 3)}
    assert tree.row_sizes == (6, 8)
    assert set(paths_of(tree, 1)) >= {(5,), (6,), (7,)}
    assert tree.valid[0].tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize("count", [1, 3, 5, 7, 30])
def test_equal_chances(count: int) -> None:
    """Of equally likely paths, those further up come first."""
    tree = grown(predict(torch.zeros(1, 3, 5), count), torch.tensor([2]), count, 3)
    lengths = sorted(map(len, paths_of(tree, 0)))
    assert lengths == ([1] * 5 + [2] * 25)[:count]


def test_certain_tokens() -> None:
    """A child is as likely as its parent, and still stands behind it."""
    logits = torch.zeros(1, 4, 6)
    logits[0, torch.arange(4), torch.tensor([3, 1, 3, 5])] = 1000.0
    for count in (1, 2, 4):
        tree = grown(predict(logits, count), torch.tensor([0]), count, 4)
        assert tree.tokens[0].tolist() == [0, 3, 1, 3, 5][: count + 1]
        assert tree.parents[0].tolist() == [-1, 0, 1, 2, 3][: count + 1]
        assert tree.is_chain and (tree.host.probs == 1).all()


def test_numbers_that_have_overflown() -> None:
    """All tokens alike: any tree, but a tree, of as many candidates."""
    logits = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 4], logits[1, 1] = torch.nan, torch.inf
    tree = grown(predict(logits, 6), torch.tensor([1, 2, 3]), 6, 2)
    assert tree.tokens[:, 0].tolist() == [1, 2, 3]
    assert tree.row_sizes == (6, 6, 6)
    for row in range(3):
        paths_of(tree, row)
    assert paths_of(tree, 2).keys() == naive(logits[2], logits[2], 3, None, 6, 2).keys()


# -- where a step ends ---------------------------------------------------------------------------


def test_where_a_step_ends() -> None:
    """A path ends at a node with the node's chance less those of its children."""
    logits, states, roots, markov_head = example(4, 3, 20, True)
    tree = grown(predict(logits, 8, (3, 0, 1, 3), markov_head, states), roots, 8, 3)
    assert tree.host is not None
    probs, parents = tree.host.probs, tree.host.parents
    found = ends(probs, parents)
    for row in range(4):
        paths = {(): 0.0, **paths_of(tree, row)}
        for node, (path, log_p) in enumerate(paths.items()):
            below = sum(
                math.exp(chance) for one, chance in paths.items() if one[:-1] == path != one
            )
            assert float(found[row, node]) == pytest.approx(math.exp(log_p) - below, abs=1e-9)
        assert not found[row, len(paths) :].any()
        assert float(found[row].sum()) == pytest.approx(1.0)
        best = sorted(range(len(paths)), key=lambda node: -found[row, node])
        for count in (1, 3, 9):
            chosen = best_ends(probs, parents, count)[row].nonzero()[0]
            assert chosen.tolist() == sorted(best[:count])


@pytest.mark.parametrize("with_markov_head", [False, True])
def test_trust_moves_all_tokens_of_a_distance(with_markov_head: bool) -> None:
    """As if the predictions had said so; no token becomes more than certain."""
    logits, states, roots, markov_head = example(2, 3, 20, with_markov_head)
    made = predict(logits, 20, None, markov_head, states)
    trust = [math.log(0.5), 0.0, math.log(0.25)]
    plain, moved = (grown(made, roots, 60, 3, one) for one in (None, trust))
    for row in range(2):
        before, after = paths_of(plain, row), paths_of(moved, row)
        both = before.keys() & after.keys()
        assert len(both) > 10 and {len(path) for path in both} >= {1, 2}
        for path in both:
            assert after[path] == pytest.approx(before[path] + sum(trust[: len(path)]), abs=1e-5)
        assert max(map(len, before)) >= max(map(len, after))
    certain = grown(made, roots, 8, 3, [50.0, 50.0, 50.0])
    assert certain.host.probs.max() == 1


def test_roots_of_rows_that_stopped_short_of_their_bonus_token() -> None:
    """Trees were grown before that was known; the last token that such a row has may be cached."""
    logits, _, bonus, _ = example(2, 3, 20, False)
    last = [7, int(bonus[1])]
    packed = grow(predict(logits, 8), bonus, 8, 3)
    state: Any = SimpleNamespace(
        grown=Grown(packed, packed.numpy()), active=[False, True], timed=True,
        root=torch.tensor(last), tokens=[[5, last[0]], [6, last[1]]],
    )  # fmt: skip
    state.received = partial(DecodeState.received, state)
    tree = GrowingDrafter.grown(GrowingDrafter.__new__(GrowingDrafter), state, None)  # type: ignore
    assert tree.host is not None and bonus[0] != 7
    assert tree.tokens[:, 0].tolist() == tree.host.tokens[:, 0].tolist() == last


# -- in decoding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 4])
def test_drafts_are_the_likeliest_of_the_hidden_state(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(predictions, "SHORTLIST", VOCAB)  # the search below knows of none
    model = fresh("llama")
    model.add_adapter(hf_spec.MedusaConfig(num_heads=3, markov_rank=rank))
    weights = randomise(model, "MEDUSA", std=0.5)
    drafter, checked = methods()["medusa"].drafter, []
    propose = drafter.propose

    def watched(self: Any, state: Any) -> Any:
        hidden = self.hidden
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
            found = paths_of(tree, row)
            assert found.keys() == expected.keys()
            checked.append(len(found))
        return tree

    monkeypatch.setattr(drafter, "propose", watched)
    with torch.no_grad():
        model.generate(
            **ragged(), max_new_tokens=12, do_sample=False, assistant_strategy="medusa",
            assistant_kwargs={"num_draft_tokens": 6, "drafting": "always"},
        )  # fmt: skip
    assert checked.count(6) > 10


@pytest.mark.parametrize(("options", "nodes"), [({"num_draft_tokens": 2}, 3), ({}, 9)])
def test_rows_of_a_step(fresh: Tiny, options: dict[str, Any], nodes: int) -> None:
    """Three probes under each node."""
    model = fresh("llama")
    expected = model.generate(prompt(), max_new_tokens=16, do_sample=False)
    torch.manual_seed(0)
    model.add_adapter(hf_spec.BitaConfig())
    rows: list[int] = []
    first: Any = model.model.layers[0]
    handle = first.register_forward_pre_hook(lambda m, args: rows.append(args[0].shape[1]))
    out = model.generate(
        prompt(), max_new_tokens=16, do_sample=False, assistant_strategy="bita",
        assistant_kwargs={**options, "drafting": "always"},
    )  # fmt: skip
    handle.remove()
    assert out.tolist() == expected.tolist()
    # The prompt, its first token with probes, and a step.
    assert rows[:3] == [12, 1 + 3, nodes + 3 * nodes]
