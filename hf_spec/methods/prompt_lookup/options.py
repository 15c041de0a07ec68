"""Options of ``prompt_lookup``."""

from __future__ import annotations

from dataclasses import dataclass

from hf_spec.core.checks import check_count, check_range
from hf_spec.core.limits import MAX_CANDIDATES
from hf_spec.drafting.ngram import Limits
from hf_spec.drafting.options import StrategyOptions


@dataclass(frozen=True)
class PromptLookupOptions(StrategyOptions):
    """Options of ``prompt_lookup``.

    Attributes:
        max_ngram: longest n-gram that is looked up.
        min_ngram: shortest n-gram that is looked up.
        max_matches: most occurrences whose continuations are merged into the tree (its width).
        max_depth: most tokens of each continuation.
        max_nodes: most candidates in the tree.
        min_probability: lowest estimated probability of a candidate; 0 keeps all.
    """

    max_ngram: int = Limits.max_ngram
    min_ngram: int = Limits.min_ngram
    max_matches: int = Limits.max_matches
    max_depth: int = Limits.max_depth
    max_nodes: int = Limits.max_nodes
    min_probability: float = Limits.min_probability

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_ngram", "min_ngram", "max_matches", "max_depth", "max_nodes"):
            check_count(name, getattr(self, name), high=MAX_CANDIDATES)
        check_range("min_probability", self.min_probability, 0.0, 1.0)
        if self.retrieval is True:
            raise ValueError(
                "retrieval=True with prompt_lookup: looking up is all that prompt_lookup does. "
                "Leave it out."
            )
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} is above max_ngram={self.max_ngram}: lower it."
            )
