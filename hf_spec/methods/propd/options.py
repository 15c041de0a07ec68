"""Options of ``propd``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_spec.core.checks import check_count
from hf_spec.drafting.options import HeadOptions
from hf_spec.methods.propd.online_tree import ONLINE
from hf_spec.methods.registry import Method, get_method

#: Value of ``drafter`` for the adapter's own heads.
HEADS = "heads"
#: Options that apply to the strategy as a whole, for any drafter.
SHARED = ("acceptance", "retrieval", "fallback", "typical_epsilon", "typical_delta")


@dataclass(frozen=True)
class ProPDOptions(HeadOptions):
    """Options of ``propd`` (ProPD, section 4).

    Attributes:
        tree, candidates, max_depth: for the adapter's own heads, as in ``medusa``. ``online`` is
            ProPD's dynamic token tree generation (section 4.2).
        drafter: ``heads``, the adapter's own; or another strategy with one forward per step, whose
            trees are pruned. Its adapter must be active, too.
        drafter_kwargs: options of that strategy.
        prune: whether to drop unlikely candidates after the adapter's ``prune_layer``. ``auto``
            tries steps with and without pruning, and continues with those that emit more tokens per
            second.
        prune_top_k: k, from 1: candidates that are not among the k likeliest tokens after their
            parent are dropped; None for the adapter's value. In a batch all rows keep equally many:
            as many as are among them in all rows together.
    """

    drafter: str = HEADS
    drafter_kwargs: dict[str, Any] = field(default_factory=dict)
    prune: bool | str = "auto"
    prune_top_k: int | None = None

    trees: ClassVar[tuple[str, ...]] = (*HeadOptions.trees, ONLINE)
    grown: ClassVar[tuple[str, ...]] = (*HeadOptions.grown, ONLINE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.prune, bool) and self.prune != "auto":
            raise ValueError(f"prune={self.prune!r}: must be 'auto', True or False.")
        if self.prune_top_k is not None:
            check_count("prune_top_k", self.prune_top_k)
        if not isinstance(self.drafter_kwargs, dict):
            raise ValueError(f"drafter_kwargs={self.drafter_kwargs!r}: give a dict of options.")
        if self.drafter != HEADS:
            self.drafting_method()
        elif self.drafter_kwargs:
            raise ValueError(
                f"drafter_kwargs={self.drafter_kwargs!r} with the adapter's own heads: their "
                "options are propd's own (tree, max_depth)."
            )

    def untimed(self) -> dict[str, Any]:
        found = super().untimed()
        if self.tree == ONLINE:
            found["tree"] = self.trees[0]
        if self.prune == "auto":
            found["prune"] = True
        if self.drafter != HEADS:
            inner = self.drafting_method().parse_options(self.drafter_kwargs).untimed()
            own = {name: value for name, value in inner.items() if name not in SHARED}
            found["drafter_kwargs"] = {**self.drafter_kwargs, **own}
            for name in self.shape:  # options of the heads, which do not draft
                found.pop(name, None)
        return found

    def looks_up(self, timed: bool) -> bool:
        if self.drafter == HEADS or self.retrieval is True:
            return super().looks_up(timed)
        inner = {**self.drafter_kwargs, "retrieval": self.retrieval}
        return self.drafting_method().parse_options(inner).looks_up(timed)

    @property
    def other_adapters(self) -> tuple[str, ...]:
        drafts = self.drafter != HEADS and self.drafting_method().needs_adapter
        return (self.drafter,) if drafts else ()

    def drafting_method(self) -> Method:
        """The strategy that ``drafter`` names.

        Raises:
            ValueError: there is no such strategy, its trees cannot be pruned, or its options are
                invalid.
        """
        method = get_method(self.drafter) if isinstance(self.drafter, str) else None
        if method is None or method.options is type(self):
            raise ValueError(
                f"drafter={self.drafter!r}: give {HEADS!r}, or the name of another strategy."
            )
        if not method.drafter.single_forward:
            raise ValueError(
                f"drafter={self.drafter!r} runs the model to draft: only the trees of strategies "
                "with one forward per step are pruned."
            )
        defaults = type(self)
        own = [name for name in self.shape if getattr(self, name) != getattr(defaults, name)]
        if own:
            raise ValueError(
                f"{own[0]}={getattr(self, own[0])!r} with drafter={self.drafter!r}: it is an "
                "option of the adapter's heads. Put the drafter's own into drafter_kwargs."
            )
        shared = [name for name in SHARED if name in self.drafter_kwargs]
        if shared:
            raise ValueError(
                f"drafter_kwargs: {shared[0]!r} is an option of the whole strategy; give it to "
                "propd itself."
            )
        method.parse_options(self.drafter_kwargs)
        return method
