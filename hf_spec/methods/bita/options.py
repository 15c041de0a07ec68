"""Options of ``bita``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_spec.core.tree import TokenTree
from hf_spec.methods.base import StrategyOptions, check_count

TREES = ("efficient", "full", "chain")


@dataclass(frozen=True)
class BitaOptions(StrategyOptions):
    """Options of ``bita`` (BiTA, section 3.2).

    Attributes:
        tree: ``efficient``: ``top_k`` candidates per level, all under the likeliest one of the
            level above (figure 5). ``full``: ``top_k`` candidates under every candidate. ``chain``:
            the likeliest only ("straightforward decoding"). Or a list of rank paths, as
            ``TokenTree.from_paths`` takes it.
        top_k: k, candidates per mask token.
        max_depth: mask tokens used; None takes all that the adapter has.
    """

    tree: str | Sequence[Sequence[int]] = "efficient"
    top_k: int = 5
    max_depth: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("top_k", self.top_k)
        if self.max_depth is not None:
            check_count("max_depth", self.max_depth)
        if isinstance(self.tree, str):
            if self.tree not in TREES:
                raise ValueError(
                    f"tree={self.tree!r}: choose one of {', '.join(TREES)}, or give rank paths."
                )
        else:
            TokenTree.from_paths(self.tree)

    def make_tree(self, depth: int) -> TokenTree:
        """The tree over ``depth`` mask tokens.

        Raises:
            ValueError: if the paths given go deeper, or ``max_depth`` does.
        """
        if self.max_depth is not None and self.max_depth > depth:
            raise ValueError(f"max_depth={self.max_depth}: the adapter has {depth} mask tokens.")
        depth = self.max_depth or depth
        if not isinstance(self.tree, str):
            tree = TokenTree.from_paths(self.tree)
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
