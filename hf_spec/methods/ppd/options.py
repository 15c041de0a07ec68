"""Options of ``ppd``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_spec.core.tree import TokenTree
from hf_spec.drafting.options import CHAIN, TreeOptions
from hf_spec.methods.ppd.dynamic_tree import DYNAMIC

#: Rank paths of the static tree: many at depth 1, which every step verifies, and few below.
STATIC: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,), (4,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1),
)  # fmt: skip


@dataclass(frozen=True)
class PPDOptions(TreeOptions):
    """Options of ``ppd`` (PPD, chapters 4 and 5).

    Attributes:
        tree: ``static``: ten candidates, all prompt tokens under each node (section 5.3).
            ``chain``: the likeliest ones only. ``dynamic``: the dynamic sparse tree of section
            5.4, which ``hf-spec tune`` has made. All values in :class:`TreeOptions` are allowed,
            too.
        max_depth: number of prompt tokens used; None for all that the adapter has.
    """

    trees: ClassVar[tuple[str, ...]] = ("static", CHAIN, DYNAMIC)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree == DYNAMIC and self.max_depth is not None:
            raise ValueError(
                f"max_depth={self.max_depth} with tree={DYNAMIC!r}, which says itself how deep it "
                "is. Leave one of the two out."
            )

    def named_tree(self, depth: int) -> TokenTree:
        chain = {(0,) * length for length in range(1, depth + 1)}
        return TokenTree.from_paths(sorted(chain.union(STATIC))).truncate(depth)
