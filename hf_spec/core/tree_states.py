"""Trees that depend on how many future tokens the last step predicted (PPD, section 5.4).

Each probe under the last accepted node predicts one future token; their number is the **state** of
a batch row. This module knows only shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hf_spec.core.limits import MAX_FUTURE, MAX_ROWS
from hf_spec.core.token_tree import TokenTree


@dataclass(frozen=True)
class TreeState:
    """The tree and probes that a batch row forwards in one state.

    Args:
        tree: the draft tokens.
        probes: distances probed under each node: n predicts n tokens after the next one.

    Raises:
        ValueError: unless there is one int >= 0 for each node, or if there are too many probes.
    """

    tree: TokenTree
    probes: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = tuple(self.probes)
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts)
        if not whole or len(counts) != len(self.tree):
            raise ValueError(
                f"probes={list(counts)[:8]} for {len(self.tree)} nodes: give each node, the root "
                "first, its number of probes, from 0."
            )
        object.__setattr__(self, "probes", counts)
        if self.num_rows() > MAX_ROWS:
            raise ValueError(
                f"{len(counts)} nodes with {sum(counts)} probes: a step has at most {MAX_ROWS} of "
                "both. Give fewer."
            )

    def num_rows(self, per_distance: int = 1) -> int:
        """Number of nodes and probes, with ``per_distance`` probes for each distance."""
        return len(self.tree) + per_distance * sum(self.probes)

    def truncate(self, max_depth: int) -> TreeState:
        """The state without the nodes deeper than ``max_depth`` and their probes."""
        return self if max_depth >= self.tree.max_depth else _truncate(self, max_depth)


@dataclass(frozen=True)
class TreeStates:
    """A dynamic tree: ``states[k]`` is used after k future tokens were predicted.

    Args:
        states: the states 0 to m; in state 0 nothing is predicted and the tree is just the root.

    Raises:
        ValueError: if a state's tree is deeper than its number, or a node has more than m probes.
    """

    states: tuple[TreeState, ...]

    def __post_init__(self) -> None:
        states = tuple(self.states)
        most = len(states) - 1
        if not 0 <= most <= MAX_FUTURE:
            raise ValueError(
                f"{len(states)} states: a dynamic tree has state 0, the root alone, and at most "
                f"{MAX_FUTURE} more."
            )
        for k, state in enumerate(states):
            if state.tree.max_depth > k:
                raise ValueError(
                    f"state {k} has draft tokens at depth {state.tree.max_depth}: {k} future "
                    "tokens are known in it."
                )
            if max(state.probes) > most:
                raise ValueError(
                    f"state {k} has a node with {max(state.probes)} probes: there are states up "
                    f"to {most}."
                )
        object.__setattr__(self, "states", states)

    @staticmethod
    @lru_cache(maxsize=512)
    def uniform(tree: TokenTree, depth: int, probed: bool = True) -> TreeStates:
        """The same tree in every state, of which at most ``depth`` future tokens are predicted.

        Args:
            probed: whether each node has probes for them; else something else predicts them.
        """
        trees = [tree.truncate(k) for k in range(depth + 1)]
        return TreeStates(tuple(TreeState(one, (depth * probed,) * len(one)) for one in trees))

    @property
    def max_probes(self) -> int:
        """m, the largest number of predicted future tokens and of distances under a node."""
        return len(self.states) - 1

    @property
    def max_rank(self) -> int:
        """Largest rank of a draft token."""
        return max(max(state.tree.ranks) for state in self.states)


@lru_cache(maxsize=512)
def _truncate(state: TreeState, max_depth: int) -> TreeState:
    kept = state.tree.kept(max_depth)
    return TreeState(state.tree.truncate(max_depth), tuple(state.probes[node] for node in kept))
