"""Options of ``layer_skip``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_spec.core.checks import check_choices, check_count, check_range
from hf_spec.core.limits import MAX_CANDIDATES
from hf_spec.drafting.options import AUTO, StrategyOptions
from hf_spec.methods.layer_skip.config import layer_indices

#: Values of ``draft_exit``: the policy's exit, then those of the paper.
POLICY = "policy"
EXITS = (POLICY, "adaptive", "threshold", "fixed")


@dataclass(frozen=True)
class LayerSkipOptions(StrategyOptions):
    """Options of ``layer_skip`` (Draft & Verify, section 3.4; defaults of its table 6).

    Drafts are greedy, or sampled if the call samples and ``acceptance="rejection"`` (algorithm 4).

    Attributes:
        skip_attention, skip_mlp: layers whose attention / MLP the draft leaves out. None takes
            those of the active ``LAYER_SKIP`` adapter.
        draft_exit: when to stop drafting. ``policy``: when the next token is not worth the time of
            its forward; drafts are then trees, of which the policy takes as many candidates as pay.
            ``adaptive`` and ``threshold`` stop after a token whose draft probability is below
            gamma, which is adapted by eqs. (2)-(4) or fixed. ``fixed`` drafts ``max_draft`` tokens.
            Under ``adaptive``, a call continues with the gamma of the previous one. ``policy`` is
            ``adaptive`` if nothing may depend on time, or if the call samples its candidates.
        max_draft: K, most tokens drafted in a step.
        threshold: gamma, its initial value under ``adaptive`` and ``policy``.
        threshold_step: epsilon of eq. (3).
        beta1, beta2: smoothing of the acceptance rate and of gamma.
        target_acceptance: alpha, the acceptance rate that ``adaptive`` aims at.
    """

    skip_attention: Sequence[int] | None = None
    skip_mlp: Sequence[int] | None = None
    draft_exit: str = POLICY
    max_draft: int = 12
    threshold: float = 0.6
    threshold_step: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9
    target_acceptance: float = 0.85

    can_sample: ClassVar[bool] = True
    #: Options of the adaptive threshold.
    adapting: ClassVar[tuple[str, ...]] = ("threshold_step", "beta1", "beta2", "target_acceptance")
    belongs: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {
        **StrategyOptions.belongs,
        "threshold": ("draft_exit", (POLICY, "adaptive", "threshold")),
        **dict.fromkeys(adapting, ("draft_exit", (POLICY, "adaptive"))),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, draft_exit=EXITS)
        check_count("max_draft", self.max_draft, high=MAX_CANDIDATES)
        for name in ("threshold", *self.adapting):
            check_range(name, getattr(self, name), 0.0, 1.0)
        for name in ("skip_attention", "skip_mlp"):
            layers = getattr(self, name)
            if layers is not None:
                object.__setattr__(self, name, layer_indices(name, layers))

    def looks_up(self, timed: bool) -> bool:
        if self.retrieval != AUTO:
            return bool(self.retrieval)
        return timed and self.draft_exit == POLICY and not self.samples

    def untimed(self) -> dict[str, Any]:
        if self.draft_exit == "fixed":
            return super().untimed()
        defaults = {name: getattr(type(self), name) for name in self.adapting}
        unused = {name: value for name, value in defaults.items() if value != getattr(self, name)}
        return {**super().untimed(), "draft_exit": "threshold", **unused}
