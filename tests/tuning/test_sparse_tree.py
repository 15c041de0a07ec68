"""Trees from accuracies: exact optima by brute force, the chain of states by simulation."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest

from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeState, TreeStates
from hf_spec.drafting.options import SPARSE
from hf_spec.tuning.trees import sparse_tree
from hf_spec.tuning.trees.bare_trees import BareTrees, counted_paths
from hf_spec.tuning.trees.future_ranks import BEYOND, MISS, FutureRanks
from hf_spec.tuning.trees.sparse_tree import Candidates, Chain, SparseTrees, chances_of

#: (distances, ranks); the second has ranks out of order, a third distance better than the second.
TABLES = [
    [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05], [0.3, 0.2, 0.1]],
    [[0.1, 0.45, 0.2], [0.05, 0.2, 0.1], [0.6, 0.1, 0.0]],
    [[0.8, 0.1, 0.05], [0.7, 0.15, 0.0], [0.6, 0.3, 0.1]],
]


def all_trees(depth: int, ranks: int, count: int) -> Iterator[TokenTree]:
    """Every tree of ``count`` candidates, each once."""
    paths = [p for d in range(1, depth + 1) for p in itertools.product(range(ranks), repeat=d)]
    for chosen in itertools.combinations(paths, count):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield TokenTree.in_order(chosen)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("depth", "ranks"), [(1, 3), (2, 3), (3, 2)])
def test_candidate_trees_are_the_best_there_are(table: list, depth: int, ranks: int) -> None:
    accuracies = np.array(table)[:, :ranks]
    found = Candidates.search(accuracies, depth, 4)
    for count in range(min(4, len(found)) + 1):
        best = max(chances_of(tree, accuracies)[0].sum() for tree in all_trees(depth, ranks, count))
        mine = chances_of(found.tree(count), accuracies)[0].sum()
        assert mine == pytest.approx(found.values[count]) == pytest.approx(best)


def test_ends_are_the_probabilities_of_the_last_accepted_node() -> None:
    accuracies = np.array(TABLES[0])
    found = Candidates.search(accuracies, 3, 12)
    for count in range(len(found) + 1):
        reach, ends = chances_of(found.tree(count), accuracies)
        assert ends.sum() == pytest.approx(1.0)
        np.testing.assert_allclose(found.ends[count, : count + 1], ends, atol=1e-12)
        # By hand for the root: none of its children.
        children = [n for n in range(1, count + 1) if found.tree(count).parents[n] == 0]
        assert ends[0] == pytest.approx(1 - reach[children].sum())


def rows_of(states: TreeStates, each: int = 1) -> int:
    """Rows of the largest state, a probe having so many."""
    return max(one.num_rows(each) for one in states.states)


def every_state(accuracies: np.ndarray, depth: int, size: int, each: int) -> list[TreeState]:
    """All trees of at most ``size`` rows with all assignments of probes of so many rows each."""
    most, ranks = len(accuracies), accuracies.shape[1]
    states = []
    for count in range(size):
        for tree in all_trees(depth, ranks, count) if depth or not count else ():
            for probes in itertools.product(range(most + 1), repeat=count + 1):
                if count + 1 + each * sum(probes) <= size:
                    states.append(TreeState(tree, probes))
    return states


def best_tau(accuracies: np.ndarray, size: int, each: int) -> float:
    """The largest R(T) over all dynamic trees, one by one."""
    choices = [every_state(accuracies, k, size, each) for k in range(len(accuracies) + 1)]
    return max(
        Chain.of(TreeStates(states), accuracies).tau for states in itertools.product(*choices)
    )


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("size", "each"), [(2, 1), (3, 1), (4, 1), (5, 1), (4, 2), (6, 2), (4, 3)])
def test_dynamic_trees_against_all_there_are(table: list, size: int, each: int) -> None:
    """With two distances and two ranks all dynamic trees of these sizes can be tried."""
    accuracies = np.array(table)[:2, :2]
    trees = SparseTrees(accuracies, size, each)
    states = trees.best(size)
    assert rows_of(states, each) <= size
    assert trees.tau(states) == pytest.approx(best_tau(accuracies, size, each), abs=1e-5)


def test_more_rows_never_hurt() -> None:
    accuracies = np.array([[0.5 * 0.8**d * 0.4**r for r in range(12)] for d in range(4)])
    trees = SparseTrees(accuracies, 24)
    before = 0.0
    for size in range(1, 25):
        tau = trees.tau(trees.best(size))
        assert tau >= before - 1e-6
        # A node without probes is allowed, not forced: statics are among what is tried.
        for other in (trees.static(size), trees.random(size)):
            assert tau >= trees.tau(other) - 1e-6
        before = tau


def test_static_and_random_trees_of_a_size() -> None:
    accuracies = np.array([[0.5 * 0.8**d * 0.4**r for r in range(12)] for d in range(3)])
    trees = SparseTrees(accuracies, 40)
    static = trees.static(22)
    assert [one.num_rows() for one in static.states] == [4, 20, 20, 20]
    twice = SparseTrees(accuracies, 40, per_distance=2).static(22)
    assert [one.num_rows(2) for one in twice.states] == [7, 21, 21, 21]
    assert {count for one in static.states for count in one.probes} == {3}
    best, drawn = trees.best(22), trees.random(22, seed=3)
    assert drawn == trees.random(22, seed=3) != trees.random(22, seed=4)
    for ours, theirs in zip(best.states, drawn.states):
        assert (len(ours.tree), sum(ours.probes)) == (len(theirs.tree), sum(theirs.probes))


@pytest.mark.parametrize("table", TABLES)
def test_the_chain_by_simulation(table: list) -> None:
    """Predicted R(T) beside simulated acceptance with the same probabilities.

    Calls start in state 0 and run for 500 steps, 100 of them; the bound is four standard errors of
    the calls' means, so that each case fails by chance once in 15,000 times. The restart adds a
    state 0 step per call, less than a step in 500.
    """
    accuracies = np.array(table)
    trees = SparseTrees(accuracies, 9)
    for states in (trees.best(9), trees.static(9), trees.random(9)):
        draw = random.Random(5)
        means = [simulate(states, accuracies, draw, 500) for _ in range(100)]
        error = 4 * np.std(means) / math.sqrt(len(means)) + 2 / 500
        assert abs(np.mean(means) - Chain.of(states, accuracies).tau) < error


def simulate(states: TreeStates, accuracies: np.ndarray, draw: random.Random, steps: int) -> float:
    """Mean tokens per step of one call: at each node a child or none is right."""
    tokens = state = 0
    for _ in range(steps):
        tree, node = states.states[state].tree, 0
        while True:
            tokens += 1  # the node's own successor is always emitted
            roll, right = draw.random(), None
            for child in range(1, len(tree)):
                if tree.parents[child] == node:
                    roll -= accuracies[tree.depths[child] - 1, tree.ranks[child]]
                    if roll < 0:
                        right = child
                        break
            if right is None:
                break
            node = right
        state = states.states[state].probes[node]
    return tokens / steps


def test_every_size_up_to_128_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations instead of seconds: choices of a state, and the probes that each looks at.

    A probe looked at takes some 50 ns (a sort), so that the bound stands for a few seconds.
    """
    looked_at = 0
    original = SparseTrees._state

    def counted(self: SparseTrees, state: int, worth: np.ndarray, size: int) -> TreeState:
        nonlocal looked_at
        number = min(size, len(self.candidates[state]) + 1)
        looked_at += number * number * self.most
        return original(self, state, worth, size)

    monkeypatch.setattr(SparseTrees, "_state", counted)
    accuracies = np.array([[0.4 * 0.85**d * 0.55**r for r in range(48)] for d in range(8)])
    trees = SparseTrees(accuracies, 128)
    for size in (16, 32, 64, 96, 128):
        looked_at = 0
        trees.best(size)
        # At most six rounds over nine states, where a dozen would be the end of it.
        assert looked_at <= 6 * 9 * size * size * 8


@pytest.mark.parametrize(
    ("table", "message"),
    [([], "shape"), ([0.5], "shape"), ([[1.2]], "probabilities"), ([[0.7, 0.7]], "sum"),
     ([[float("nan")]], "probabilities")],
)  # fmt: skip
def test_wrong_accuracies(table: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseTrees(table, 4)


def test_what_is_never_right_takes_no_row() -> None:
    trees = SparseTrees([[0.5, 0.0], [0.0, 0.0]], 16)
    states = trees.best(16)
    assert [one.tree.num_candidates for one in states.states] == [0, 1, 1]
    assert max(max(one.probes) for one in states.states) == 1
    assert trees.tau(states) == pytest.approx(1.5, abs=1e-5)


def test_gains_are_concave() -> None:
    gains = sparse_tree._gains(np.array([0.0, 0.1, 0.5, 0.6]))
    np.testing.assert_allclose(gains, [0.25, 0.25, 0.1])


# -- without probes ----------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_bare_trees_against_all_there_are(table: list, size: int) -> None:
    accuracies = np.array(table)
    trees = BareTrees(accuracies, 5)
    states = trees.best(size)
    assert rows_of(states) == size and states.max_probes == 3
    best = max(chances_of(tree, accuracies)[0].sum() for tree in all_trees(3, 3, size - 1))
    assert trees.tau(states) == pytest.approx(best)
    for depth, state in enumerate(states.states):
        assert state.tree == states.states[-1].tree.truncate(depth) and not any(state.probes)
    # Every tree of this many rows with probes knows no more than one without.
    assert trees.tau(states) >= SparseTrees(accuracies, 5).tau(SparseTrees(table, 5).best(size))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5])
def test_counted_paths_against_all_trees(count: int) -> None:
    """Ranks that depend on each other: a second token is right where the first is a guess, too."""
    draw = random.Random(3)
    places = []
    for _ in range(200):
        first = draw.choice([0, 0, 1, 2, -1])
        places.append((first, draw.choice([first, first, 0]), draw.choice([0, 1, -1])))

    def accepted(tree: TokenTree) -> int:
        return sum(place[:depth] in tree.paths for place in places for depth in (1, 2, 3))

    paths = counted_paths(places)
    tree = BareTrees(TABLES[0], 6).of(paths, count + 1).states[-1].tree
    assert tree.num_candidates == count
    assert accepted(tree) == max(accepted(one) for one in all_trees(3, 3, count))


def test_bare_trees_to_compare_with() -> None:
    accuracies = np.array([[0.5 * 0.8**d * 0.4**r for r in range(12)] for d in range(4)])
    trees = BareTrees(accuracies, 40)
    tree = trees.static(16).states[-1].tree
    # What medusa takes unless it is told something else, but for one of the unlikeliest.
    assert set(SPARSE) - set(tree.paths) == {(4,)} and set(tree.paths) - set(SPARSE) == {(1, 1)}
    for size in range(2, 41):
        best, static, drawn = trees.best(size), trees.static(size), trees.random(size, seed=3)
        assert rows_of(best) == rows_of(static) == rows_of(drawn) == size
        assert trees.tau(best) >= max(trees.tau(static), trees.tau(drawn)) - 1e-12
    assert drawn == trees.random(40, seed=3) != trees.random(40, seed=4)


def test_bare_trees_leave_out_what_is_never_right() -> None:
    states = BareTrees([[0.5, 0.0], [0.0, 0.0]], 16).best(16)
    assert [len(one.tree) for one in states.states] == [1, 2, 2]


@pytest.mark.parametrize("table", TABLES)
def test_bare_trees_by_replay_of_planted_ranks(table: list) -> None:
    """f(T) beside the steps of answers whose ranks are drawn with these accuracies.

    100 answers of 400 tokens; the bound is four standard errors of the answers' means, so that a
    case fails by chance once in 15,000 times. The last step of an answer is cut off by its end: no
    more than 3 tokens of 400, which the bound adds.
    """
    accuracies, draw = np.array(table), np.random.default_rng(5)
    trees = BareTrees(accuracies, 9)
    chances = np.column_stack([accuracies, 1 - accuracies.sum(1)])  # the last: not predicted
    answers = []
    for _ in range(100):
        ranks = np.column_stack([draw.choice(4, 401, p=row) for row in chances])
        ranks[ranks == 3] = MISS
        for distance in range(1, 4):
            ranks[400 - distance :, distance - 1] = BEYOND
        answers.append(ranks)
    for states in (trees.best(9), trees.static(9), trees.random(9)):
        each = [FutureRanks((one,), per_distance=0).replay(states) for one in answers]
        assert all(one.visits[:-1].sum() == 0 and one.tokens == 400 for one in each)
        means = [one.tau_after_prefill for one in each]
        error = 4 * np.std(means) / math.sqrt(len(means)) + 3 / 400 * trees.tau(states)
        assert abs(np.mean(means) - trees.tau(states)) < error


def test_planted_accuracies_are_found_again() -> None:
    """From places where steps begin, too, as planted ranks do not depend on the place.

    Of 40,000 places at least 7,000 count at each distance; the bound is five standard errors.
    """
    accuracies, draw = np.array(TABLES[2]), np.random.default_rng(6)
    chances = np.column_stack([accuracies, 1 - accuracies.sum(1)])
    ranks = np.column_stack([draw.choice(4, 40_000, p=row) for row in chances])
    ranks[ranks == 3] = MISS
    ranks[-3:] = BEYOND
    found = FutureRanks((ranks,), per_distance=0)
    for table in (found.accuracies(), found.landed_accuracies(8)):
        assert np.abs(table[:, :3] - accuracies).max() < 5 * math.sqrt(0.25 / 7000)
