"""Dynamic trees: states and their limits."""

from typing import Any

import pytest

from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeState, TreeStates

ROOT = TreeState(TokenTree.chain(0), (2,))
ONE = TreeState(TokenTree.from_paths([[0], [1]]), (2, 2, 1))
TWO = TreeState(TokenTree.from_paths([[0], [1], [0, 0], [0, 2]]), (2, 1, 0, 2, 1))


def test_counts() -> None:
    states = TreeStates((ROOT, ONE, TWO))
    assert states.max_probes == 2
    assert [state.num_rows() for state in states.states] == [3, 8, 11]
    assert [state.num_rows(3) for state in states.states] == [7, 18, 23]  # 3 EPTs


def test_truncate_keeps_the_probes_of_the_nodes_kept() -> None:
    assert TWO.truncate(1) == TreeState(TokenTree.from_paths([[0], [1]]), (2, 1, 0))
    assert TWO.truncate(0) == TreeState(TokenTree.chain(0), (2,))
    assert TWO.truncate(2) is TWO


def test_uniform() -> None:
    tree = TokenTree.from_paths([[0], [1], [0, 0]])
    states = TreeStates.uniform(tree, 2)
    assert [state.tree for state in states.states] == [tree.truncate(k) for k in range(3)]
    assert [set(state.probes) for state in states.states] == [{2}] * 3


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "0 states: .* and at most 256 more"),
        ([([], [])], "1 nodes"),
        ([([], [-1])], "from 0"),
        ([([], [True])], "from 0"),
        ([([], [1])], "states up to 0"),
        ([([[0]], [0, 0])], "state 0 has draft tokens at depth 1"),
        ([([], [0])] * 9999, "9999 states: .* and at most 256 more"),
        ([([], [4096])], "1 nodes with 4096 probes: a step has at most 4096 of"),
    ],
)
def test_what_is_refused(states: list[tuple[Any, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeStates(
            tuple(TreeState(TokenTree.from_paths(paths), probes) for paths, probes in states)
        )
