"""Options of ``space``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_spec.core.checks import check_count
from hf_spec.drafting.options import ONLINE, OnlineOptions


@dataclass(frozen=True)
class SpaceOptions(OnlineOptions):
    """Options of ``space`` (SPACE, section 3.2).

    Attributes:
        tree: ``chain``, the paper's; ``online``: trees of the likeliest tokens, chosen while
            decoding. Their candidates are not sampled, so that the rule is ``match``.
        max_rows: most rows of a step of such a tree; None: 64.
        num_candidates: candidates per step, at most the adapter's mask tokens; None takes as many.
            In an online tree, its depth.
    """

    tree: str = "chain"
    num_candidates: int | None = None

    can_sample: ClassVar[bool] = True
    trees: ClassVar[tuple[str, ...]] = ("chain",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree not in (known := (*self.trees, ONLINE)):
            raise ValueError(f"tree={self.tree!r}: choose one of {', '.join(known)}.")
        if self.tree == ONLINE and self.acceptance == "rejection":
            raise ValueError(
                "acceptance='rejection' with tree='online', whose candidates are not sampled. Use "
                "acceptance='match', which is exact for them."
            )
        if self.num_candidates is not None:
            check_count("num_candidates", self.num_candidates)

    def count(self, available: int) -> int:
        """Candidates per step where the adapter has ``available`` mask tokens.

        Raises:
            ValueError: more are asked for.
        """
        if self.num_candidates is not None and self.num_candidates > available:
            raise ValueError(
                f"num_candidates={self.num_candidates}: the adapter has {available} mask tokens."
            )
        return self.num_candidates or available
