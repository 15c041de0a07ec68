"""TokenTree against its definition, node by node in Python; what it and dynamic trees refuse."""

import itertools
import random
from typing import Any

import pytest
from random_trees import random_tree

from hf_spec.core.shapes import TokenTree, TreeState, TreeStates

PATHS = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 2, 1]]


def test_from_paths_orders_nodes_by_depth_and_keeps_ranks() -> None:
    tree = TokenTree.from_paths(PATHS)
    assert all(TokenTree.from_paths(order) == tree for order in itertools.permutations(PATHS))
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 4)
    assert tree.ranks == (0, 0, 1, 0, 2, 0, 1)
    assert tree.depths == (0, 1, 1, 2, 2, 2, 3)
    assert [list(path) for path in tree.paths] == PATHS
    assert (len(tree), tree.num_draft_tokens, tree.max_depth) == (7, 6, 3)


def states(*given: Any) -> TreeStates:
    """Of ``(paths, probes)``."""
    return TreeStates(
        tuple(TreeState(TokenTree.from_paths(paths), probes) for paths, probes in given)
    )


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (TokenTree.from_paths, [paths], message) for paths, message in (
            ([[0], []], r"path \[\]: the root is implied"),
            ([[0], [-1]], r"path \[-1\]: ranks count from 0"),
            ([[0], [0, -2]], r"path \[0, -2\]: ranks count from 0"),
            ([[0], [0, 1], [0]], r"path \[0\] is given twice"),
            ([[0], [1, 0]], r"path \[1, 0\]: its parent \[1\] is missing. Add it"),
            ([[0, 0, 0], [0]], r"path \[0, 0, 0\]: its parent \[0, 0\] is missing"),
            ([[rank] for rank in range(20_000)], "more than 1024 draft tokens: leave some out"),
            ([5], "path 5: give a list of ranks"),
            (["01"], "path '01': give a list of ranks"),
            ([[None]], "ranks are whole numbers, None is not"),
            ([[0.5]], r"ranks are whole numbers, 0\.5 is not"),
            ([[0], [0] * 20_000], r"path \[0, 0, 0, 0, 0, 0, 0, 0\] ...: at most 1024 ranks"),
        )
    ] + [
        (TokenTree, given, message) for *given, message in (
            ((), r"parents\[0\] must be -1"),
            ((0, 0), r"parents\[0\] must be -1"),
            ((-1, 1), r"parents\[1\]=1: a parent stands before its child.*0\.\.0"),
            ((-1, 0, 3, 0), r"parents\[2\]=3.*0\.\.1"),
            ((-1, -1), r"parents\[1\]=-1"),
            ((-1, 0), (0,), "1 ranks for 2 nodes"),
            ((-1, 0), (0, -1), r"ranks\[1\]=-1: ranks count from 0"),
            ((-1, 0, 0), (0, 2, 2), "node 2: node 0 has two children of rank 2"),
            ((-1, *[0] * 19_999), "20000 nodes: a tree has at most 2048"),
        )
    ] + [
        (TokenTree.chain, [19_999], "20000 nodes: a tree has at most 2048"),
    ] + [
        (states, given, message) for *given, message in (
            ("0 states: .* and at most 256 more",),
            (([], []), "1 nodes"),
            (([], [-1]), "from 0"),
            (([], [True]), "from 0"),
            (([], [1]), "states up to 0"),
            (([[0]], [0, 0]), "state 0 has draft tokens at depth 1"),
            (*[([], [0])] * 9999, "9999 states: .* and at most 256 more"),
            (([], [4096]), "1 nodes with 4096 probes: a step has at most 4096 of"),
        )
    ],
)  # fmt: skip
def test_what_is_refused(make: Any, given: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(*given)


def test_trees_have_a_limit() -> None:
    """With room for two trees that are merged."""
    assert len(TokenTree.chain(1024)) == len(TokenTree.from_paths([[n] for n in range(1024)]))
    assert len(TokenTree((-1, *[0] * 2047))) == 2048


@pytest.mark.parametrize("length", range(5))
def test_a_chain_has_one_node_per_depth(length: int) -> None:
    tree = TokenTree.chain(length)
    assert tree.parents == tuple(range(-1, length))
    assert tree.depths == tuple(range(length + 1))
    assert tree.paths == tuple((0,) * depth for depth in range(1, length + 1))


@pytest.mark.parametrize("seed", range(10))
def test_truncate_keeps_exactly_the_shallow_nodes(seed: int) -> None:
    rng = random.Random(seed)
    paths = random_tree(rng, rng.randint(1, 14)).paths
    tree = TokenTree.from_paths([[3 * rank for rank in path] for path in paths])
    for depth in range(tree.max_depth + 2):
        cut, kept = tree.truncate(depth), tree.kept(depth)
        assert kept == [node for node in range(len(tree)) if tree.depths[node] <= depth]
        assert cut.paths == tuple(path for path in tree.paths if len(path) <= depth)
        assert cut.depths == tuple(tree.depths[node] for node in kept)
        assert cut.ranks == tuple(tree.ranks[node] for node in kept)
    tree = TokenTree((-1, 0, 1, 2, 0, 4))  # depth first: parents are renumbered
    assert tree.truncate(1).parents == (-1, 0, 0)
    assert tree.truncate(2).parents == (-1, 0, 1, 0, 3)
    assert tree.truncate(3) is tree
