"""Options of ``ppd``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_spec.core.tree import TokenTree
from hf_spec.core.tree_states import TreeStates
from hf_spec.methods.base import StrategyOptions, check_count

TREES = ("static", "chain")
#: Candidates of the static tree: many where they are sure to be looked at, few below.
STATIC: tuple[tuple[int, ...], ...] = (
    (0,),
    (1,),
    (2,),
    (3,),
    (4,),
    (0, 0),
    (0, 1),
    (1, 0),
    (0, 0, 0),
    (0, 0, 1),
)


@dataclass(frozen=True)
class PPDOptions(StrategyOptions):
    """Options of ``ppd`` (PPD, chapters 4 and 5).

    Attributes:
        tree: ``static``: ten candidates, all prompt tokens under each node. ``chain``: the
            likeliest only. Or a list of rank paths, as ``TokenTree.from_paths`` takes it, with all
            prompt tokens under each node. Or a dynamic tree, the states as ``TreeStates.to_json``
            gives them: which candidates, and how many prompt tokens under each node, for each
            number of predicted tokens (section 5.4).
        max_depth: prompt tokens used; None takes all that the adapter has, or the dynamic tree's.
    """

    tree: str | Sequence[Any] | Mapping[str, Any] = "static"
    max_depth: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_depth is not None:
            check_count("max_depth", self.max_depth)
        if isinstance(self.tree, str):
            if self.tree not in TREES:
                raise ValueError(
                    f"tree={self.tree!r}: choose one of {', '.join(TREES)}, or give rank paths, or "
                    "the states of a dynamic tree."
                )
        elif self._dynamic:
            if TreeStates.from_json(self.tree).max_probes < 1:
                raise ValueError("tree has state 0 only: give the states up to the prompt tokens.")
            if self.max_depth is not None:
                raise ValueError(
                    f"max_depth={self.max_depth} with a dynamic tree, which says itself how many "
                    "prompt tokens there are. Leave one of the two out."
                )
        else:
            TokenTree.from_paths(self.tree)  # type: ignore[arg-type]

    @property
    def _dynamic(self) -> bool:
        tree = self.tree
        return isinstance(tree, Mapping) or any(isinstance(item, Mapping) for item in tree)

    def make_states(self, available: int) -> TreeStates:
        """The trees, and the prompt tokens under their nodes, in each state.

        Args:
            available: prompt tokens of the adapter.

        Raises:
            ValueError: the options want more of them.
        """
        depth = self.max_depth or available
        if depth > available:
            raise ValueError(f"max_depth={depth}: the adapter has {available} prompt tokens.")
        if isinstance(self.tree, str):
            paths = {(0,) * length for length in range(1, depth + 1)}
            if self.tree == "static":
                paths |= {path for path in STATIC if len(path) <= depth}
            return TreeStates.uniform(TokenTree.from_paths(sorted(paths)), depth)
        if self._dynamic:
            states = TreeStates.from_json(self.tree)
            if states.max_probes > available:
                raise ValueError(
                    f"the dynamic tree has states up to {states.max_probes}, the adapter "
                    f"{available} prompt tokens: tune the tree for this adapter."
                )
            return states
        tree = TokenTree.from_paths(self.tree)  # type: ignore[arg-type]
        if tree.max_depth > depth:
            raise ValueError(
                f"tree has paths of {tree.max_depth} ranks, {depth} prompt tokens are used: give "
                "shorter paths."
            )
        return TreeStates.uniform(tree, depth)
