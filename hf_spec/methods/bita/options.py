"""Options of ``bita``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_spec.core.tree import TokenTree
from hf_spec.methods.base import StrategyOptions, check_count
from hf_spec.methods.tuned_trees import TUNED, is_dynamic

TREES = ("efficient", "full", "chain")


@dataclass(frozen=True)
class BitaOptions(StrategyOptions):
    """Options of ``bita`` (BiTA, section 3.2).

    Attributes:
        tree: ``efficient``: ``top_k`` candidates per level, all under the likeliest one of the
            level above (figure 5). ``full``: ``top_k`` candidates under every candidate. ``chain``:
            the likeliest only ("straightforward decoding"). ``tuned``: what ``hf-spec tune`` chose
            for this device. Or a list of rank paths, as ``TokenTree.from_paths`` takes it, or of
            the states of a dynamic tree, as ``TreeStates.to_json`` gives it.
        top_k: k, candidates per mask token.
        max_depth: mask tokens used; None takes all that the adapter has.
    """

    tree: str | Sequence[Sequence[int]] | Sequence[dict[str, Any]] = "efficient"
    top_k: int = 5
    max_depth: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("top_k", self.top_k)
        if self.max_depth is not None:
            check_count("max_depth", self.max_depth)
        if is_dynamic(self.tree):
            return
        if isinstance(self.tree, str):
            if self.tree not in TREES:
                raise ValueError(
                    f"tree={self.tree!r}: choose one of {', '.join((*TREES, TUNED))}, or give rank "
                    "paths."
                )
            return
        self._own_tree()

    def _own_tree(self) -> TokenTree:
        paths: Any = self.tree
        return TokenTree.from_paths(paths)

    def depth(self, available: int) -> int:
        """Mask tokens used of those that the adapter has.

        Raises:
            ValueError: ``max_depth`` is more.
        """
        if self.max_depth is not None and self.max_depth > available:
            raise ValueError(
                f"max_depth={self.max_depth}: the adapter has {available} mask tokens."
            )
        return self.max_depth or available

    def make_tree(self, depth: int) -> TokenTree:
        """The static tree over as many of ``depth`` mask tokens as are used.

        Raises:
            ValueError: if the paths given go deeper, or ``max_depth`` does.
        """
        depth = self.depth(depth)
        if not isinstance(self.tree, str):
            tree = self._own_tree()
            if tree.max_depth > depth:
                raise ValueError(
                    f"tree has paths of {tree.max_depth} ranks, the adapter drafts {depth} tokens: "
                    "give shorter paths."
                )
            return tree
        if self.tree == "chain":
            return TokenTree.chain(depth)
        paths: list[list[int]] = []
        level: list[list[int]] = [[]]
        for _ in range(depth):
            parents = level if self.tree == "full" else level[:1]
            level = [[*parent, rank] for parent in parents for rank in range(self.top_k)]
            paths += level
        return TokenTree.from_paths(paths)
