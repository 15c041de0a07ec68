"""Options of ``bita``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_spec.core.tree import TokenTree
from hf_spec.methods.base import check_count
from hf_spec.methods.tree_options import TreeOptions


@dataclass(frozen=True)
class BitaOptions(TreeOptions):
    """Options of ``bita`` (BiTA, section 3.2).

    Attributes:
        tree: ``efficient``: ``top_k`` candidates per level, all under the likeliest one of the
            level above (figure 5). ``full``: ``top_k`` candidates under every candidate. ``chain``:
            the likeliest only ("straightforward decoding"). Or what :class:`TreeOptions` says.
        top_k: k, candidates per mask token.
        max_depth: mask tokens used; None takes all that the adapter has.
    """

    tree: str | Sequence[Sequence[int]] | Sequence[dict[str, Any]] = "efficient"
    top_k: int = 5

    trees: ClassVar[tuple[str, ...]] = ("efficient", "full", "chain")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("top_k", self.top_k)

    def named_tree(self, depth: int) -> TokenTree:
        if self.tree == "chain":
            return TokenTree.chain(depth)
        paths: list[list[int]] = []
        level: list[list[int]] = [[]]
        for _ in range(depth):
            parents = level if self.tree == "full" else level[:1]
            level = [[*parent, rank] for parent in parents for rank in range(self.top_k)]
            paths += level
        return TokenTree.from_paths(paths)
