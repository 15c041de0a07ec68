"""Options of ``medusa``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_spec.core.tree import TokenTree
from hf_spec.methods.base import StrategyOptions, check_count

TREES = ("sparse", "chain")

#: ``sparse``: rank paths, the likeliest first. On held-out answers of a 22M model they are worth
#: 0.3 % less than the 15 best nodes there (docs/medusa.md).
SPARSE: tuple[tuple[int, ...], ...] = (
    (0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1), (1, 0), (0, 0, 1), (0, 0, 0, 0), (3,), (0, 2),
    (2, 0), (1, 0, 0), (0, 1, 0), (4,),
)  # fmt: skip


@dataclass(frozen=True)
class MedusaOptions(StrategyOptions):
    """Options of ``medusa`` (Medusa, sections 2.1.2 and 2.3.3).

    Attributes:
        tree: ``sparse``: 15 candidates, most of them under likely ones. ``chain``: each head's
            likeliest token only, as in blockwise parallel decoding. Or a tree of your own: rank
            paths as ``TokenTree.from_paths`` takes them (Medusa's choices), or what
            ``TokenTree.to_json`` gives, as text or read.
        max_depth: heads used; None takes all that the adapter has.
    """

    tree: str | Sequence[Sequence[int]] | Mapping[str, Any] = "sparse"
    max_depth: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_depth is not None:
            check_count("max_depth", self.max_depth)
        self._own_tree()

    def _own_tree(self) -> TokenTree | None:
        """The tree that was given; None if it was named."""
        tree = self.tree
        if isinstance(tree, Mapping):
            return TokenTree.from_json(json.dumps(tree))
        if not isinstance(tree, str):
            return TokenTree.from_paths(tree)
        if tree.startswith("{"):
            return TokenTree.from_json(tree)
        if tree not in TREES:
            raise ValueError(
                f"tree={tree!r}: choose one of {', '.join(TREES)}, or give rank paths."
            )
        return None

    def make_tree(self, heads: int) -> TokenTree:
        """The tree over ``heads`` heads.

        Raises:
            ValueError: if the tree given is deeper, or ``max_depth`` is.
        """
        if self.max_depth is not None and self.max_depth > heads:
            raise ValueError(f"max_depth={self.max_depth}: the adapter has {heads} heads.")
        depth = self.max_depth or heads
        tree = self._own_tree()
        if tree is not None:
            if tree.max_depth > depth:
                raise ValueError(
                    f"tree has paths of {tree.max_depth} ranks, the adapter drafts {depth} tokens: "
                    "give shorter paths."
                )
            return tree
        if self.tree == "chain":
            return TokenTree.chain(depth)
        return TokenTree.from_paths(SPARSE).truncate(depth)
