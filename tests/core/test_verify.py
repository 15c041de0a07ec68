"""Acceptance rules against walks in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from known_scores import Scores
from random_trees import random_tree
from torch import Tensor

from hf_spec.core import verify
from hf_spec.core.probes import ProbeGroup
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult


def trees_of(parents: Sequence[int], tokens: Tensor) -> Tree:
    """The same tree with the tokens (batch, nodes) of each row."""
    return Tree.of_shapes([TokenTree(tuple(parents))] * len(tokens)).with_tokens(tokens)


def random_case(seed: int, vocab: int = 3, rows: int = 40, nodes: int = 8) -> Tree:
    """A tree per row, some nodes invalid as if the row's budget ended."""
    rng = random.Random(seed)
    trees = [random_tree(rng, rng.randint(1, nodes)) for _ in range(rows)]
    tree = Tree.of_shapes(trees)
    kept = torch.tensor([rng.randint(0, 5) for _ in trees])[:, None]
    lost = torch.tensor([[rng.random() < 0.1 for _ in range(tree.num_nodes)] for _ in trees])
    lost[:, 0] = False
    valid = tree.valid & ((tree.depths <= kept) & ~lost | (tree.depths == 0))
    tokens = torch.randint(
        vocab, (rows, tree.num_nodes), generator=torch.Generator().manual_seed(seed)
    )
    return tree.with_tokens(tokens).changed(valid=valid)


def argmax(scores: Tensor, depth: int = 0) -> Tensor:
    return scores.argmax(-1)


def known(targets: Tensor, vocab: int) -> Scores:
    """Scores whose argmax is the target at every node."""
    return Scores(torch.nn.functional.one_hot(targets, vocab).double())


def children(tree: Tree, row: int, node: int) -> list[int]:
    parents, valid = tree.parents[row].tolist(), tree.valid[row].tolist()
    return [child for child in range(1, tree.num_nodes) if parents[child] == node and valid[child]]


def walk(tree: Tree, targets: Tensor, row: int) -> list[int]:
    """The accepted path: from the root always into the first child that carries the target."""
    path = [0]
    while True:
        wanted = int(targets[row, path[-1]])
        hits = [c for c in children(tree, row, path[-1]) if int(tree.tokens[row, c]) == wanted]
        if not hits:
            return path
        path.append(hits[0])


def assert_row(accepted: StepResult, row: int, path: list[int], emitted: list[int]) -> None:
    count = int(accepted.counts[row])
    assert accepted.path[row].tolist()[:count] == path
    assert not accepted.path[row, count:].any()
    assert accepted.tokens[row].tolist()[:count] == emitted


@pytest.mark.parametrize("vocab", [2, 3, 6])
@pytest.mark.parametrize("seed", range(8))
def test_match_and_match_along_equal_a_walk(seed: int, vocab: int) -> None:
    tree = random_case(seed, vocab)
    tokens = tree.tokens
    targets = torch.randint(vocab, tokens.shape, generator=torch.Generator().manual_seed(seed + 99))
    at_once = verify.match(tree, targets)
    scores = known(targets, vocab)
    along = verify.match_along(tree, scores, argmax)
    assert at_once.path.shape == at_once.tokens.shape == (len(tokens), tree.max_depth + 1)
    for row in range(len(tokens)):
        path = walk(tree, targets, row)
        last = int(targets[row, path[-1]])
        emitted = [*(int(tokens[row, node]) for node in path[1:]), last]
        assert_row(at_once, row, path, emitted)
        assert_row(along, row, path, emitted)
        assert scores.asked[row] == path  # along the accepted path only, in order
    assert {1, 2} <= set(at_once.counts.tolist())


def naive_typical(tree: Tree, chances: Tensor, row: int, epsilon: float, delta: float) -> list[int]:
    """The definition: accepted nodes, then the longest path, then the likeliest."""
    best, best_key = [0], (1, 0.0)
    todo = [([0], 0.0)]
    while todo:
        path, likelihood = todo.pop(0)
        if (len(path), likelihood) > best_key:
            best, best_key = path, (len(path), likelihood)
        p = chances[row, path[-1]].tolist()
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        limit = min(epsilon, delta * math.exp(-entropy))
        for child in children(tree, row, path[-1]):
            chance = p[int(tree.tokens[row, child])]
            if chance > limit:
                todo.append(([*path, child], likelihood + math.log(chance)))
    return best


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.3, 1.0), (0.5, 0.6), (1.0, 0.9)])
@pytest.mark.parametrize("seed", range(8))
def test_typical_equals_its_definition(seed: int, epsilon: float, delta: float) -> None:
    vocab = 4
    tree = random_case(seed, vocab)
    tokens = tree.tokens
    generator = torch.Generator().manual_seed(seed + 7)
    logits = 2.0 * torch.randn(*tokens.shape, vocab, generator=generator)
    banned = torch.randint(vocab, (*tokens.shape, 1), generator=generator)
    logits = logits.scatter(2, banned, -torch.inf)  # as a warper leaves them
    scores = Scores(logits)
    accepted = verify.typical(tree, scores, argmax, epsilon, delta)
    chances = logits.double().softmax(-1)
    for row in range(len(tokens)):
        path = naive_typical(tree, chances, row, epsilon, delta)
        bonus = int(logits[row, path[-1]].argmax())
        assert_row(accepted, row, path, [*(int(tokens[row, n]) for n in path[1:]), bonus])
        asked = scores.asked[row]
        assert len(set(asked)) == len(asked)
        above = [int(tree.parents[row, node]) for node in asked[1:]]
        assert asked[0] == 0 and all(one in asked[:n] for n, one in enumerate(above, 1))
        leaves = [node for node in asked if not children(tree, row, node)]
        assert set(leaves) <= {0, path[-1]}  # of what has no candidates only where the path ends
    assert len(set(accepted.counts.tolist())) > 1
    # Rows are asked side by side, whichever nodes they are at, and once more where paths end.
    assert scores.calls <= max(map(len, scores.asked)) + 1


def test_every_rule_gives_the_probes_of_the_last_accepted_node() -> None:
    tree = trees_of((-1, 0, 0, 2), torch.tensor([[9, 0, 1, 2]] * 3)).attach_probes(
        ProbeGroup.causal(3), [[1, 2, 3, 0], [0, 1, 2, 3], [3, 0, 1, 2]]
    )
    targets = torch.tensor([[1, 0, 2, 0], [0, 2, 0, 0], [2, 0, 0, 0]])
    scores = known(targets, 3).scores.log()
    q = torch.full((3, 4, 3), 1 / 3)
    for result in (
        verify.match(tree, targets),
        verify.match_along(tree, Scores(scores), argmax),
        verify.typical(tree, Scores(scores), argmax),
        verify.rejection(tree.changed(q=q), Scores(scores)),
    ):
        assert result.path[:, :3].tolist() == [[0, 2, 3], [0, 1, 0], [0, 0, 0]]
        assert result.num_probes.tolist() == [0, 1, 3]
        assert result.last.tolist() == [3, 1, 0]
        assert result.bonus.tolist() == [0, 2, 2]
    roots = Tree.roots(torch.tensor([9])).attach_probes(ProbeGroup.causal(3), [[2]])
    assert verify.match(roots, torch.tensor([[1]])).num_probes.tolist() == [2]


@pytest.mark.parametrize("more", [None, [[0.5, -1.0], [2.0, 2**24 - 1.0]]])
def test_the_result_on_the_host(more: list[list[float]] | None) -> None:
    """Whatever stands past the counts; tokens are exact beside float32 numbers."""
    large = 2**24 - 1
    result = StepResult(
        torch.tensor([[0, 2, 5], [0, 7, 7]]), torch.tensor([3, 1]),
        torch.tensor([[large, 3, 4], [6, 0, 0]]), torch.tensor([2, 0]),
    )  # fmt: skip
    host, numbers = result.to_host(None if more is None else torch.tensor(more))
    assert host == ([[0, 2, 5], [0]], [[large, 3, 4], [6]], [2, 0])
    assert numbers is None if more is None else numbers.tolist() == more
