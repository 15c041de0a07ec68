"""The trees that are left when unlikely nodes are dropped, against the definition."""

import random
from collections.abc import Sequence

import pytest
import torch
from random_trees import GROUPS, random_row
from torch import Tensor

from hf_spec.core.pruning import connected, keep_likely
from hf_spec.core.shapes import TokenTree
from hf_spec.core.tree import Tree

SHAPE = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 1, 0], [2, 0, 0]])


def path_log_p(tree: Tree, seed: int = 0) -> Tensor:
    """Log-probabilities of paths, each below that of the node before."""
    tree, generator = tree.without_probes, torch.Generator().manual_seed(seed)
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
    tree: Tree, shapes: Sequence[TokenTree], wanted: Tensor, log_p: Tensor
) -> tuple[list[list[int]], Tree, Tensor]:
    """The kept nodes of each row by the definition, and what is left, which are these."""
    expected = kept_by_definition(shapes, wanted.tolist(), log_p)
    found = keep_likely(tree, connected(tree, wanted), log_p)
    assert found is not None
    left, rows = found
    assert left.num_tokens == max(map(len, expected)), "no row is padded for another"
    assert left.slots is not None and torch.equal(left.slots, rows[:, : left.num_tokens])
    for row, (shape, nodes) in enumerate(zip(shapes, expected)):
        count, own = len(nodes), left.without_probes
        assert left.slots[row, :count].tolist() == nodes and left.row_sizes[row] == count - 1
        assert own.valid[row].tolist() == [n < count for n in range(left.num_tokens)]
        parents = [-1, *(nodes.index(shape.parents[n]) for n in nodes[1:])]
        assert own.parents[row, :count].tolist() == parents
        for name in ("tokens", "depths"):
            assert torch.equal(getattr(own, name)[row, :count], getattr(tree, name)[row, nodes])
    # What is left sees what it saw.
    for row, at in enumerate(rows):
        assert torch.equal(left.ancestors[row], tree.ancestors[row][at][:, at])
    return expected, left, rows


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
    expected, left, at = check(tree, shapes, wanted, path_log_p(tree, seed))
    assert left.num_probes == max(sum(c[n] for n in kept) for c, kept in zip(counts, expected))
    for row, kept in enumerate(expected):
        for place, node in enumerate(kept):
            own = left.probes_of(torch.full((len(rows),), place))[row, : counts[row][node]]
            was = tree.probes_of(torch.full((len(rows),), node))[row, : counts[row][node]]
            assert at[row, own].tolist() == was.tolist()
            assert left.valid[row, own].all() and (left.parents[row, own] == place).all()
            for name in ("tokens", "depths"):
                assert torch.equal(getattr(left, name)[row, own], getattr(tree, name)[row, was])


def test_rows_with_less_than_others() -> None:
    """A chain, a row that drafts nothing, and one whose candidates are all unlikely."""
    shapes = [SHAPE, TokenTree.chain(2), TokenTree.chain(0), SHAPE]
    wanted = torch.ones(4, len(SHAPE), dtype=torch.bool)
    wanted[3] = False
    tree = Tree.of_shapes(shapes)
    left = check(tree, shapes, wanted, path_log_p(tree))[0]
    # Of 10 + 3 + 1 + 1 likely nodes the chain and the third row hold 4, the others 6 each.
    assert [len(nodes) for nodes in left] == [6, 3, 1, 6]
    shapes, none = [TokenTree.chain(1)] * 2, torch.zeros(2, 2)
    assert check(Tree.of_shapes(shapes), shapes, none.bool(), none)[0] == [[0], [0]]
    assert keep_likely(tree, tree.valid, path_log_p(tree)) is None, "all of it is likely"
