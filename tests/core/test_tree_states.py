"""Dynamic trees: states, their limits, and their form on disk."""

from __future__ import annotations

import json
import re
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


def test_json_round_trip_keeps_the_order_of_the_nodes() -> None:
    states = TreeStates((ROOT, ONE, TWO))
    assert TreeStates.from_json(json.loads(json.dumps(states.to_json()))) == states
    data = states.to_json()
    data[2] = {"paths": [[1], [0], [0, 2], [0, 0]], "probes": [2, 0, 1, 1, 2]}
    other = TreeStates.from_json(data).states[2]
    by_path = dict(zip([(), *other.tree.paths], other.probes))
    assert by_path == {(): 2, (1,): 0, (0,): 1, (0, 2): 1, (0, 0): 2}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "list of states"),
        ("ab", "list of states"),
        ([], "state 0"),
        ([{"paths": []}], "list of states"),
        ([{"paths": [], "probes": [1], "more": 1}], "list of states"),
        ([{"paths": [], "probes": 1}], "list of states"),
        ([{"paths": [], "probes": []}], "1 nodes"),
        ([{"paths": [], "probes": [-1]}], "from 0"),
        ([{"paths": [], "probes": [True]}], "from 0"),
        ([{"paths": [], "probes": [1]}], "states up to 0"),
        ([{"paths": [[0]], "probes": [0, 0]}], "state 0 has candidates at depth 1"),
        ([{"paths": [], "probes": [0]}] * 9999, "9999 states: .* and at most 256 more"),
        ([{"paths": [], "probes": [4096]}], "1 nodes with 4096 probes: a step has at most 4096 of"),
        ([{"paths": [[0, 0]], "probes": [0, 0]}], re.escape("parent [0] is missing")),
    ],
)
def test_what_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeStates.from_json(data)
