"""Dynamic trees: states and their limits."""

from typing import Any

import pytest

from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeState, TreeStates


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
