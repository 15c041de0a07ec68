"""The trees that are left when unlikely nodes are dropped, against the definition."""

import random
from collections.abc import Sequence

import pytest
import torch
from random_trees import GROUPS, path_to, random_row
from torch import Tensor

from hf_spec.core import verify
from hf_spec.core.pruning import connected, keep_likely
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree

SHAPE = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 1, 0], [2, 0, 0]])


def path_log_p(tree: Tree, seed: int = 0) -> Tensor:
    """Log-probabilities of paths, each below that of the node before."""
    tree, generator = tree.drafted, torch.Generator().manual_seed(seed)
    own = -torch.rand(tree.parents.shape, generator=generator) - 0.1
    own[:, 0] = 0.0
    return (tree.ancestors * own[:, None, :]).sum(-1)


def kept_by_definition(
    trees: Sequence[TokenTree], wanted: list[list[bool]], log_p: Tensor
) -> list[list[int]]:
    """Each row's nodes: in all as many as are likely, the likely ones first."""
    likely: list[list[int]] = []
    for tree, marks in zip(trees, wanted):
        likely.append([0])
        for node, parent in enumerate(tree.parents[1:], 1):
            if marks[node] and parent in likely[-1]:
                likely[-1].append(node)
    room = 1
    while sum(min(room, len(tree)) for tree in trees) < sum(map(len, likely)):
        room += 1
    return [
        sorted(
            sorted(range(len(tree)), key=lambda n: (n not in nodes, -float(log_p[row, n])))[:room]
        )
        for row, (tree, nodes) in enumerate(zip(trees, likely))
    ]


def check(
    shapes: Sequence[TokenTree], wanted: Tensor, log_p: Tensor, tree: Tree | None = None
) -> list[list[int]] | None:
    """The kept nodes of each row, and that they are what the definition says; None for all."""
    tree = tree or Tree.of_shapes(shapes)
    expected = kept_by_definition(shapes, wanted.tolist(), log_p)
    found = keep_likely(tree, connected(tree, wanted), log_p)
    if found is None:
        assert max(map(len, expected)) == tree.num_tokens
        return None
    left, rows = found
    assert left.num_tokens == max(map(len, expected)), "no row is padded for another"
    assert left.slots is not None and torch.equal(left.slots, rows[:, : left.num_tokens])
    for row, (shape, nodes) in enumerate(zip(shapes, expected)):
        count, own = len(nodes), left.drafted
        assert left.slots[row, :count].tolist() == nodes and left.row_sizes[row] == count - 1
        padding = [False] * (left.num_tokens - count)
        assert own.valid[row].tolist() == [True] * count + padding
        smaller = TokenTree(tuple(nodes.index(shape.parents[n]) if n else -1 for n in nodes))
        same = Tree.of_shapes([smaller])
        for name in ("parents", "depths"):
            assert torch.equal(getattr(own, name)[row, :count], getattr(same, name)[0])
        assert torch.equal(own.tokens[row, :count], tree.tokens[row, nodes])
        assert torch.equal(own.ancestors[row, :count, :count], same.ancestors[0])
    # What is left sees what it saw.
    for row, at in enumerate(rows):
        assert torch.equal(left.ancestors[row], tree.ancestors[row][at][:, at])
    return expected


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("seed", range(10))
def test_probes_go_and_stay_with_their_nodes(seed: int, group: str) -> None:
    rng, probes = random.Random(seed), GROUPS[group]
    rows = [random_row(rng, rng.randint(3, 9)) for _ in range(rng.randint(1, 3))]
    shapes = [TokenTree(tuple(row.parents)) for row in rows]
    counts = [[rng.randint(0, len(probes)) for _ in row.parents] for row in rows]
    tree = Tree.of_rows(rows, "cpu").attach_probes(probes, counts)
    nodes = tree.num_tokens
    wanted = torch.rand(len(rows), nodes, generator=torch.Generator().manual_seed(seed)) < 0.5
    wanted[:, -1] = False
    log_p = path_log_p(tree, seed)
    expected = check(shapes, wanted, log_p, tree)
    assert expected is not None
    found = keep_likely(tree, connected(tree, wanted), log_p)
    assert found is not None
    left, at = found
    assert left.num_probes == max(sum(c[n] for n in kept) for c, kept in zip(counts, expected))
    for row, kept in enumerate(expected):
        for place, node in enumerate(kept):
            own = left.probes_of(torch.full((len(rows),), place))[row, : counts[row][node]]
            was = tree.probes_of(torch.full((len(rows),), node))[row, : counts[row][node]]
            assert at[row, own].tolist() == was.tolist()
            assert left.valid[row, own].all() and (left.parents[row, own] == place).all()
            for name in ("tokens", "depths"):
                assert torch.equal(getattr(left, name)[row, own], getattr(tree, name)[row, was])


@pytest.mark.parametrize("seed", range(10))
def test_the_accepted_path_is_that_of_the_whole_tree_up_to_what_went(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng, rng.randint(2, 9)) for _ in range(3)]
    tree = Tree.of_rows(rows, "cpu").attach_probes(GROUPS["causal"])
    wanted = torch.rand(3, tree.num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.6
    wanted[:, -1] = False
    found = keep_likely(tree, connected(tree, wanted), path_log_p(tree, seed))
    assert found is not None
    left, at = found
    assert left.slots is not None
    targets = torch.full((3, tree.num_tokens), 10**6)
    for row, own in enumerate(rows):
        path = path_to(own.parents, rng.randrange(len(own.parents)))
        targets[row, path[:-1]] = tree.tokens[row, path[1:]]
    whole = verify.match(tree, targets).to_host()[0]
    part = verify.match(left, targets.gather(1, left.slots)).to_host()[0]
    for row, path in enumerate(whole.path):
        kept = [node for node in path if node in left.slots[row].tolist()]
        assert [int(left.slots[row, node]) for node in part.path[row]] == kept


def test_rows_with_less_than_others() -> None:
    """A chain, a row that drafts nothing, and one whose candidates are all unlikely."""
    shapes = [SHAPE, TokenTree.chain(2), TokenTree.chain(0), SHAPE]
    wanted = torch.ones(4, len(SHAPE), dtype=torch.bool)
    wanted[3] = False
    left = check(shapes, wanted, path_log_p(Tree.of_shapes(shapes)))
    # Of 10 + 3 + 1 + 1 likely nodes the chain and the third row hold 4, the others 6 each.
    assert left is not None and [len(nodes) for nodes in left] == [6, 3, 1, 6]
    nothing = check([TokenTree.chain(1)] * 2, torch.zeros_like(wanted[:2, :2]), torch.zeros(2, 2))
    assert nothing == [[0], [0]]
