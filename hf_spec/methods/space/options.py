"""Options of ``space``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_spec.methods.base import StrategyOptions, check_count


@dataclass(frozen=True)
class SpaceOptions(StrategyOptions):
    """Options of ``space`` (SPACE, section 3.2).

    Attributes:
        num_candidates: candidates per step, at most the adapter's mask tokens; None takes as many.
    """

    num_candidates: int | None = None

    samples_drafts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
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
