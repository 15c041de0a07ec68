"""PPD's dynamic sparse tree: exact optima by brute force, the chain of states by simulation, the
choice of a size by step times, and decoding with the tree that an adapter's config has."""

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB, Tiny, check_same, prompt
from replay import RECORDED
from running import drafting

import hf_spec
from hf_spec.adapters.loading import require_active
from hf_spec.core.shapes import TreeState, TreeStates
from hf_spec.core.tree import TokenTree
from hf_spec.methods.ppd.dynamic_tree import (
    RANKS,
    best_size,
    best_trees,
    chain,
    likeliest_paths,
    long_run,
    make_dynamic_tree,
    measure_accuracies,
    reach_and_ends,
)
from hf_spec.methods.registry import get_method

NEW = {"max_new_tokens": 24, "do_sample": False}
DYNAMIC = drafting("ppd", tree="dynamic")
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
@pytest.mark.parametrize(("depth", "ranks"), [(0, 3), (1, 3), (2, 3), (3, 2)])
def test_the_likeliest_paths_are_the_best_trees(table: list, depth: int, ranks: int) -> None:
    accuracies = np.array(table)[:, :ranks]
    paths, chances = likeliest_paths(accuracies[:depth], 4)
    assert len(paths) == (min(4, ranks) if depth else 0) or depth > 1
    for count in range(len(paths) + 1):
        tree = TokenTree.in_order(paths[:count])
        mine = reach_and_ends(tree, accuracies)[0].sum()
        trees = all_trees(depth, ranks, count) if depth else [TokenTree.chain(0)]
        best = max(reach_and_ends(one, accuracies)[0].sum() for one in trees)
        assert mine == pytest.approx(1 + sum(chances[:count])) == pytest.approx(best)


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


def tau_of(states: TreeStates, accuracies: np.ndarray) -> float:
    """Tokens per step in the long run."""
    return long_run(*chain(states, accuracies))[0]


def best_tau(accuracies: np.ndarray, size: int, each: int) -> float:
    """The largest R(T) over all dynamic trees, one by one."""
    choices = [every_state(accuracies, k, size, each) for k in range(len(accuracies) + 1)]
    return max(tau_of(TreeStates(states), accuracies) for states in itertools.product(*choices))


@pytest.mark.parametrize(
    ("size", "each", "table"),
    [(2, 1, 0), (3, 1, 1), (4, 1, 0), (4, 1, 2), (5, 1, 1), (4, 2, 0), (6, 2, 1), (4, 3, 2)],
)
def test_dynamic_trees_against_all_there_are(size: int, each: int, table: int) -> None:
    """With two distances and two ranks all dynamic trees of these sizes can be tried."""
    accuracies = np.array(TABLES[table])[:2, :2]
    states = best_trees(accuracies, size, each)
    assert max(one.num_rows(each) for one in states.states) <= size
    tau = tau_of(states, accuracies)
    assert tau == pytest.approx(best_tau(accuracies, size, each), abs=1e-5)


@pytest.mark.parametrize("table", TABLES)
def test_the_chain_by_simulation(table: list) -> None:
    """Predicted R(T) beside simulated acceptance with the same probabilities.

    Calls start in state 0 and run for 500 steps, 100 of them; the bound is four standard errors of
    the calls' means, so that each case fails by chance once in 15,000 times. The restart adds a
    state 0 step per call, less than a step in 500.
    """
    accuracies, draw = np.array(table), random.Random(5)
    states = best_trees(accuracies, 9)
    means = [simulate(states, accuracies, draw, 500) for _ in range(100)]
    error = 4 * np.std(means) / math.sqrt(len(means)) + 2 / 500
    assert abs(np.mean(means) - tau_of(states, accuracies)) < error


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


def test_what_is_never_right_takes_no_step_token() -> None:
    accuracies = np.array([[0.5, 0.0], [0.0, 0.0]])
    states = best_trees(accuracies, 16)
    assert [one.tree.num_draft_tokens for one in states.states] == [0, 1, 1]
    assert max(max(one.probes) for one in states.states) == 1
    assert tau_of(states, accuracies) == pytest.approx(1.5, abs=1e-5)


def adapted(model: Any, **fields: Any) -> Any:
    torch.manual_seed(2)
    model.add_adapter(hf_spec.PPDConfig(**fields))
    return model


@pytest.mark.parametrize("num_ept", [1, 2])
def test_accuracies_are_those_of_the_predictions(fresh: Tiny, num_ept: int) -> None:
    """One place at a time."""
    model = adapted(fresh("llama"), num_prompt_tokens=2, num_ept=num_ept)
    drafter = get_method("ppd").make_drafter(model, get_method("ppd").parse_options({}))
    answers = [model.generate(prompt(seed=seed), **NEW)[0].tolist() for seed in range(2)]
    texts = [(ids[:12], ids[12:]) for ids in answers]
    table = measure_accuracies(drafter.predictor, texts)
    assert table.shape == (2, RANKS) and table.min() >= 0 and table.sum(1).max() <= 1 + 1e-9
    hits, places = np.zeros(2), 0
    for before, answer in texts:
        ids = [*before, *answer]
        for last in range(len(before) - 1, len(ids) - 3):
            known = torch.tensor([ids[: last + 1]])
            ((logits,),) = drafter.predictor.future_logits(known, torch.tensor([last]))
            hits += logits.argmax(-1).numpy() == ids[last + 2 : last + 4]
            places += 1
    np.testing.assert_allclose(table[:, 0], hits / places)


def test_the_size_goes_by_step_times() -> None:
    """Where step tokens are free the largest tree is as good as any; where they cost as much as a
    step, none pays."""
    table = np.array([[0.5 * 0.8**d * 0.4**r for r in range(RANKS)] for d in range(3)])
    free = best_size(table, 1, lambda n: 1.0, 24)[1]
    states, cheap = best_size(table, 1, lambda n: 1.0 + 0.02 * n, 24)
    dear = best_size(table, 1, lambda n: 1.0 * n, 24)[1]
    assert 24 >= free["size"] > cheap["size"] > dear["size"] == 2
    assert free["tau"] == pytest.approx(free["speedup"]) and free["tau"] > cheap["tau"]
    assert states == best_trees(table, int(cheap["size"]))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("num_ept", [1, 2])
def test_made_used_and_saved(fresh: Tiny, tmp_path: Path, num_ept: int) -> None:
    model = adapted(fresh("llama"), num_prompt_tokens=2, num_ept=num_ept)
    model.generation_config.assistant_strategy = "ppd"
    model.generation_config.assistant_kwargs = {"tree": "dynamic"}  # which is about to be made
    prompts = [prompt(seed=seed)[0].tolist() for seed in range(2)]
    expected = make_dynamic_tree(model, prompts, max_size=12, max_new_tokens=30)
    assert 1 + num_ept <= expected["size"] <= 12 and expected["tau"] >= 1
    plain = fresh("llama").generate(prompt(), **NEW)  # this model's calls draft
    assert torch.equal(model.generate(prompt(), **NEW, **DYNAMIC), plain)
    eager = hf_spec.last_stats(model)
    assert eager.num_drafted_tokens > 0
    for _ in range(2):
        assert torch.equal(model.generate(prompt(), **NEW, **DYNAMIC, **RECORDED), plain)
    replayed = hf_spec.last_stats(model)
    assert replayed.details["compiled"]["made"] == 0
    assert replayed.accepted_histogram == eager.accepted_histogram
    model.save_pretrained(tmp_path)
    other = fresh("llama")
    other.load_adapter(tmp_path)
    trees = [require_active(one, "PPD", "ppd").config.dynamic_tree for one in (model, other)]
    assert trees[0] == trees[1] and len(trees[0]) == 3
    check_same(other, DYNAMIC, prompt(), **NEW)


def test_what_makes_no_tree(fresh: Tiny) -> None:
    with pytest.raises(ValueError, match="needs an active adapter of type PPD"):
        make_dynamic_tree(fresh("llama"), [[5, 6]])
    model = adapted(fresh("llama"))
    for given, message in (
        ({"max_size": 1}, "max_size=1: must be a whole number from 2"),
        ({"max_new_tokens": 2}, "answers end after a few tokens: give other prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            make_dynamic_tree(model, [[5, 6]], **given)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (None, "has no dynamic tree. Make it with .*make_dynamic_tree"),
        (
            [{"paths": [], "probes": [1]}, {"paths": [[VOCAB]], "probes": [1, 1]}],
            "dynamic_tree has .*of rank 61: ",
        ),
        (
            [{"paths": [], "probes": [0]}] * 5,
            "dynamic_tree has .*up to 4 predicted tokens, the adapter drafts 3",
        ),
    ],
)
def test_trees_that_do_not_fit(fresh: Tiny, states: Any, message: str) -> None:
    model = adapted(fresh("llama"), dynamic_tree=states)
    with pytest.raises(ValueError, match=message):
        model.generate(prompt(), **NEW, **DYNAMIC)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([{"paths": [[0]], "probes": [0, 0]}], "state 0 has draft tokens at depth 1"),
        ([{"paths": []}], "'probes'"),
        ([], "0 states"),
        (7, "not iterable"),
    ],
)
def test_broken_trees(states: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"dynamic_tree is none .*{message}.* make_dynamic_tree"):
        hf_spec.PPDConfig(dynamic_tree=states)
