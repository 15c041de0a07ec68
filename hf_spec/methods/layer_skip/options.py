"""Options of ``layer_skip``, and when it stops drafting."""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_spec.core.checks import choice, distinct_layers, number, setting
from hf_spec.core.memory import locked
from hf_spec.drafting.calibration import DraftExit
from hf_spec.drafting.options import AUTO, DraftOptions

#: Values of ``draft_exit``: the policy's exit, then those of the paper.
POLICY = "policy"
EXITS = (POLICY, "adaptive", "threshold", "fixed")
#: K of the paper by default.
MOST_DRAFTED = 12
#: Where gamma adapts, and where there is one.
ADAPTING = {"draft_exit": (POLICY, "adaptive")}
GAMMA = {"draft_exit": (POLICY, "adaptive", "threshold")}
SHARE = number(0.0, 1.0)


@dataclass(frozen=True)
class LayerSkipOptions(DraftOptions):
    """Options of ``layer_skip`` (Draft & Verify, section 3.4; defaults of its table 6).

    Drafts are greedy, or sampled if the call samples and ``acceptance="rejection"`` (algorithm 4).

    Attributes:
        skip_attention, skip_mlp: layers whose attention (or recurrence) / MLP the draft leaves out.
            None takes those of the active ``LAYER_SKIP`` adapter.
        draft_exit: when to stop drafting. ``policy``: when the next token is not worth the time of
            its forward; drafts are then trees, whose size the policy chooses.
            ``adaptive`` and ``threshold`` stop after a token whose draft probability is below
            gamma, which is adapted by eqs. (2)-(4) or fixed. ``fixed`` drafts ``num_draft_tokens``.
            Under ``adaptive``, a call continues with the gamma of the previous one. ``policy`` is
            ``adaptive`` if nothing may depend on time, or if the call samples its draft tokens.
        num_draft_tokens: K, most tokens drafted in a step; ``auto``: 12.
        threshold: gamma, its initial value under ``adaptive`` and ``policy``.
        threshold_step: epsilon of eq. (3).
        beta1, beta2: smoothing of the acceptance rate and of gamma.
        target_acceptance: alpha, the acceptance rate that ``adaptive`` aims at.
    """

    former_names = {"max_draft": "num_draft_tokens"}

    skip_attention: Sequence[int] | None = None
    skip_mlp: Sequence[int] | None = None
    draft_exit: str = setting(POLICY, rule=choice(*EXITS))
    threshold: float = setting(0.6, rule=SHARE, only=GAMMA)
    threshold_step: float = setting(0.01, rule=SHARE, only=ADAPTING)
    beta1: float = setting(0.5, rule=SHARE, only=ADAPTING)
    beta2: float = setting(0.9, rule=SHARE, only=ADAPTING)
    target_acceptance: float = setting(0.85, rule=SHARE, only=ADAPTING)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("skip_attention", "skip_mlp"):
            layers = getattr(self, name)
            if layers is not None:
                object.__setattr__(self, name, sorted(distinct_layers(name, layers)))

    @property
    def most(self) -> int:
        """K: most tokens drafted in a step."""
        return MOST_DRAFTED if self.num_draft_tokens == AUTO else int(self.num_draft_tokens)


class ThresholdExit(DraftExit):
    """Decides when to stop drafting: by what it costs, or by gamma (section 3.4, eqs. (2)-(4)).

    A drafting stage moves gamma by (1 - beta2) epsilon, 0.001 with the paper's numbers, so adapting
    takes hundreds of stages.

    Attributes:
        gamma: draft probability below which drafting stops.
        acceptance: AR, smoothed; None before the first stage.
    """

    def __init__(self, options: LayerSkipOptions):
        super().__init__(options.most)
        self.options = options
        self.gamma = options.threshold
        self.acceptance: float | None = None

    @property
    def by_confidence(self) -> bool:
        """Whether draft probabilities decide."""
        return self.options.draft_exit != "fixed"

    def go_on(self, confidence: float) -> bool:
        """Whether to draft another token after one of this draft probability."""
        return not self.by_confidence or confidence >= self.gamma

    @locked
    def update(self, acceptance: float) -> None:
        """Adapt gamma to AR_e, the acceptance rate of drafting stage e over all sequences."""
        if self.options.draft_exit not in (POLICY, "adaptive"):
            return
        o = self.options
        beta1 = o.beta1 if self.acceptance is not None else 0.0
        smoothed = beta1 * (self.acceptance or 0.0) + (1 - beta1) * acceptance  # eq. (2)
        step = o.threshold_step if smoothed <= o.target_acceptance else -o.threshold_step
        gamma = o.beta2 * self.gamma + (1 - o.beta2) * (self.gamma + step)  # eqs. (3), (4)
        # Values beyond [0, 1] have the same effect, but returning from them would take long.
        self.gamma = min(max(gamma, 0.0), 1.0)
        self.acceptance = smoothed
