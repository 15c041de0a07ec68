"""Options of strategies whose trees hold the likeliest tokens of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_spec.core.tree import TokenTree
from hf_spec.methods.tree_options import TreeOptions

#: ``sparse``: rank paths, the likeliest first. On held-out answers of a 22M model they are worth
#: 0.3 % less than the 15 best nodes there (docs/medusa.md).
SPARSE: tuple[tuple[int, ...], ...] = (
    (0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1), (1, 0), (0, 0, 1), (0, 0, 0, 0), (3,), (0, 2),
    (2, 0), (1, 0, 0), (0, 1, 0), (4,),
)  # fmt: skip


@dataclass(frozen=True)
class HeadOptions(TreeOptions):
    """Options of a strategy with heads (Medusa, sections 2.1.2 and 2.3.3).

    Attributes:
        tree: ``sparse``: 15 candidates, most of them under likely ones. ``chain``: each head's
            likeliest token only, as in blockwise parallel decoding. Or what :class:`TreeOptions`
            says; rank paths are Medusa's choices, and the states of a dynamic tree have no probes.
        max_depth: heads used; None takes all that the adapter has.
    """

    tree: str | Sequence[Sequence[int]] | Sequence[dict[str, Any]] = "sparse"

    trees: ClassVar[tuple[str, ...]] = ("sparse", "chain")
    hangs_probes: ClassVar[bool] = False

    def named_tree(self, depth: int) -> TokenTree:
        if self.tree == "chain":
            return TokenTree.chain(depth)
        return TokenTree.from_paths(SPARSE).truncate(depth)
