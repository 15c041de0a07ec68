"""The option ``tree`` of strategies that draft the likeliest tokens of learned predictions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_spec.core.checks import check_count
from hf_spec.core.tree import TokenTree
from hf_spec.core.tree_states import TreeStates
from hf_spec.methods.base import StrategyOptions

#: What the option ``tree`` says for trees that are chosen while decoding, and for those that
#: ``hf-spec tune`` has chosen.
ONLINE, TUNED = "online", "tuned"


def is_dynamic(tree: Any) -> bool:
    """Whether the option ``tree`` names tuned trees or gives a dynamic one.

    A dynamic tree is a list of states as ``TreeStates.to_json`` gives it.

    Raises:
        ValueError: it looks like a dynamic tree, and is none.
    """
    if tree == TUNED:
        return True
    if isinstance(tree, str) or not isinstance(tree, Sequence) or not len(tree):
        return False
    if isinstance(tree[0], dict):
        TreeStates.from_json(tree)
        return True
    return False


@dataclass(frozen=True)
class OnlineOptions(StrategyOptions):
    """Options of a strategy whose trees can be chosen while decoding (ProPD, section 4.2).

    Attributes:
        tree: ``online`` does so.
        max_rows: most rows of a step of such a tree, its nodes and probes, per batch row; None: 64.
    """

    tree: Any = ""
    max_rows: int | None = None

    #: Names of static trees that the method has, the usual one first.
    trees: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_rows is None:
            return
        check_count("max_rows", self.max_rows, low=2, high=512)
        if self.tree != ONLINE:
            raise ValueError(
                f"max_rows={self.max_rows} is of tree='online'; leave it out with another one."
            )

    def untimed(self) -> dict[str, Any]:
        static = {"tree": self.trees[0], "max_rows": None} if self.tree == ONLINE else {}
        return {**super().untimed(), **static}


@dataclass(frozen=True)
class TreeOptions(OnlineOptions):
    """Options of a strategy whose candidates stand on trees of ranked predictions.

    Attributes:
        tree: a name of the method's; ``tuned``, what ``hf-spec tune`` chose for this device;
            ``online``, chosen while decoding; a list of rank paths, as ``TokenTree.from_paths``
            takes it, with all probes under each node; or a dynamic tree, a list of states as
            ``TreeStates.to_json`` gives it.
        max_depth: future tokens drafted, besides the certain one; None takes as many as the adapter
            predicts. Dynamic trees say it themselves.
    """

    tree: str | Sequence[Sequence[int]] | Sequence[dict[str, Any]] = ""
    max_depth: int | None = None

    #: Whether predictions take probes under the nodes; else every step knows all of them.
    hangs_probes: ClassVar[bool] = True
    #: Options that decide the trees' shape; dynamic trees take their place.
    shape: ClassVar[tuple[str, ...]] = ("tree", "max_depth", "max_rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_depth is not None:
            check_count("max_depth", self.max_depth)
        if is_dynamic(self.tree):
            if self.max_depth is not None:
                raise ValueError(
                    f"max_depth={self.max_depth} with a dynamic tree, which says itself how deep "
                    "it is. Leave one of the two out."
                )
            if self.tree != TUNED and len(self.tree) < 2:
                raise ValueError("tree has state 0 only: give states for predicted tokens, too.")
            self._check_probes()
        elif not isinstance(self.tree, str):
            self._paths()
        elif self.tree not in (*self.trees, ONLINE):
            names = ", ".join((*self.trees, ONLINE, TUNED))
            raise ValueError(
                f"tree={self.tree!r}: choose one of {names}, or give rank paths, or the states of "
                "a dynamic tree."
            )

    @abstractmethod
    def named_tree(self, depth: int) -> TokenTree:
        """The static tree that ``tree`` names, over predictions of ``depth`` future tokens."""

    def make_tree(self, available: int) -> TokenTree:
        """The static tree of the options.

        Args:
            available: future tokens that the adapter predicts.

        Raises:
            ValueError: if the paths given go deeper, or ``max_depth`` does.
        """
        if self.max_depth is not None and self.max_depth > available:
            raise ValueError(
                f"max_depth={self.max_depth}: the adapter predicts {available} future tokens."
            )
        depth = self.max_depth or available
        if self.tree == ONLINE:
            return TokenTree.chain(depth)  # until a step needs a tree
        if isinstance(self.tree, str):
            return self.named_tree(depth)
        tree = self._paths()
        if tree.max_depth > depth:
            raise ValueError(
                f"tree has paths of {tree.max_depth} ranks, {depth} future tokens are drafted: "
                "give shorter paths."
            )
        return tree

    def _check_probes(self) -> None:
        """Raise a ValueError if a dynamic tree has probes that nothing would be predicted from."""
        if self.hangs_probes or self.tree == TUNED:
            return
        most = max(max(state.probes) for state in TreeStates.from_json(self.tree).states)
        if most:
            raise ValueError(
                f"tree has a node with {most} probes: this strategy predicts without probes, so "
                "give 0 for every node."
            )

    def _paths(self) -> TokenTree:
        paths: Any = self.tree
        return TokenTree.from_paths(paths)
