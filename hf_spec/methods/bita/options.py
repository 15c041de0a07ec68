"""Options of ``bita``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_spec.core.checks import check_count
from hf_spec.core.limits import MAX_CANDIDATES
from hf_spec.core.token_tree import TokenTree
from hf_spec.drafting.options import CHAIN, TreeOptions

#: Default number of candidates per mask token.
TOP_K = 5
#: The tree with mask tokens after the last token only: the first line of table 4.
STRAIGHTFORWARD = "straightforward"


@dataclass(frozen=True)
class BitaOptions(TreeOptions):
    """Options of ``bita`` (BiTA, section 3.2).

    Attributes:
        tree: ``efficient``: ``top_k`` candidates per level, all under the likeliest one of the
            level above (figure 5). ``full``: ``top_k`` candidates under every candidate. ``chain``:
            the likeliest ones only, like ``full`` with k = 1. ``straightforward``: the same chain
            with one group of mask tokens, which do not attend to the candidates (figure 4). All
            values in :class:`TreeOptions` are allowed, too.
        top_k: k, candidates per mask token of ``efficient`` and ``full`` trees; None for 5.
        max_depth: number of mask tokens used; None for all that the adapter has.
    """

    top_k: int | None = None

    trees: ClassVar[tuple[str, ...]] = ("efficient", "full", CHAIN, STRAIGHTFORWARD)
    shape: ClassVar[tuple[str, ...]] = (*TreeOptions.shape, "top_k")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree == STRAIGHTFORWARD and self.retrieval is True:
            raise ValueError(
                "retrieval=True with tree='straightforward', whose one group of mask tokens is for "
                "its own chain. Use tree='chain'."
            )
        if self.top_k is None:
            return
        check_count("top_k", self.top_k, high=MAX_CANDIDATES)
        if self.tree not in ("efficient", "full"):
            raise ValueError(
                f"top_k={self.top_k} is of the trees 'efficient' and 'full'; leave it out with "
                "another one."
            )

    def named_tree(self, depth: int) -> TokenTree:
        if self.tree == STRAIGHTFORWARD:
            return TokenTree.chain(depth)
        width = self.top_k or TOP_K
        paths: list[list[int]] = []
        level: list[list[int]] = [[]]
        for _ in range(depth):
            parents = level if self.tree == "full" else level[:1]
            level = [[*parent, rank] for parent in parents for rank in range(width)]
            paths += level
            if len(paths) > MAX_CANDIDATES:  # refused below; deeper levels may not fit in memory
                break
        return TokenTree.from_paths(paths)
