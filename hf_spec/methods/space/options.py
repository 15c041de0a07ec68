"""Options of ``space``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_spec.drafting.options import ADAPTIVE, AUTO, CHAIN, TreeOptions


@dataclass(frozen=True)
class SpaceOptions(TreeOptions):
    """Options of ``space`` (SPACE, section 3.2).

    Attributes:
        tree: ``chain``: one candidate for each mask token, as in the paper. All values in
            :class:`TreeOptions` are allowed, too. Only the candidates of a chain can be sampled, so
            ``acceptance="rejection"`` uses a chain instead of an adaptive tree.
        max_depth: number of mask tokens used; None for all that the adapter has.
    """

    can_sample: ClassVar[bool] = True
    trees: ClassVar[tuple[str, ...]] = (CHAIN,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.acceptance != "rejection" or self.is_chain:
            return
        if self.tree != ADAPTIVE or self.candidates != AUTO:
            raise ValueError(
                f"acceptance='rejection' with tree={self.tree!r}, whose candidates are not "
                "sampled. Use tree='chain', or acceptance='match', which is exact for them."
            )
        object.__setattr__(self, "tree", CHAIN)

    @property
    def is_chain(self) -> bool:
        return isinstance(self.tree, str) and self.tree == CHAIN
