"""Options of ``prompt_lookup``."""

from __future__ import annotations

from dataclasses import dataclass

from hf_spec.methods.base import StrategyOptions, check_count, check_range


@dataclass(frozen=True)
class PromptLookupOptions(StrategyOptions):
    """Options of ``prompt_lookup``.

    Attributes:
        max_ngram: longest n-gram that is looked up.
        min_ngram: shortest n-gram that is looked up.
        max_matches: occurrences whose continuations are merged into the tree (its width).
        max_depth: tokens taken from each continuation.
        max_nodes: most candidates in the tree.
        min_probability: candidates whose estimated probability is lower are left out; 0 keeps all.
    """

    max_ngram: int = 4
    min_ngram: int = 1
    max_matches: int = 8
    max_depth: int = 12
    max_nodes: int = 15
    min_probability: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_ngram", "min_ngram", "max_matches", "max_depth", "max_nodes"):
            check_count(name, getattr(self, name))
        check_range("min_probability", self.min_probability, 0.0, 1.0)
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} is above max_ngram={self.max_ngram}: lower it."
            )
