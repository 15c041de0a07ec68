"""The LAYER_SKIP adapter: the sublayers that drafting skips, and low-rank updates of the rest.

The updates, if there are any, are trained by distillation from the full model (Draft & Verify,
appendix F). As in decoding, draft tokens see the full model's KV cache: the full model
runs over a sequence once, and the drafting model runs over short pieces of it, as if they were
drafted.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.low_rank import ALPHA, LowRankAdapter, check_targets
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import check_count, count, distinct_layers, setting
from hf_spec.core.limits import MAX_RANK
from hf_spec.core.probes import ProbeGroup
from hf_spec.drafting.losses import Ahead, mean_loss, own_predictions, prediction_losses
from hf_spec.model.hidden_states import model_logits
from hf_spec.model.probe_inputs import ProbeInputs
from hf_spec.model.sequences import probe_sequences
from hf_spec.modeling_patches.layer_skip import LayerSkipper
from hf_spec.modeling_patches.modules import linear_modules
from hf_spec.modeling_patches.weights import placement


@dataclass
class LayerSkipConfig(SpecPeftConfig):
    """Attention and MLP sublayers that drafting skips.

    Both lists may be empty; drafting then costs as much as verifying. They are kept sorted. The
    adapter has weights only with a `draft_rank`.

    Raises:
        ValueError: if an entry is not an integer >= 0, is given twice, or exceeds the last layer
            of `base_facts`.
    """

    type_name: ClassVar[str] = "LAYER_SKIP"

    skip_attention: list[int] = field(
        default_factory=list, metadata={"help": "Layers whose attention drafting skips."}
    )
    skip_mlp: list[int] = field(
        default_factory=list, metadata={"help": "Layers whose MLP drafting skips."}
    )
    draft_rank: int = setting(
        0, "Rank of trained low-rank updates for drafting; 0: none.", count(0, MAX_RANK)
    )
    draft_alpha: float = setting(16, "The updates are scaled by draft_alpha / draft_rank.", ALPHA)
    draft_target_modules: list[str] | str | None = setting(
        None,
        "Linear modules with updates: names, or a regular expression. Default: all that drafting "
        "runs.",
        check_targets,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        layers: Any = (self.base_facts or {}).get("num_hidden_layers")
        if layers is not None:
            why = "Leave it out: attaching the adapter records it."
            check_count("num_hidden_layers of base_facts", layers, why=why)
        last, why = layers and layers - 1, "By base_facts, these are the base's. Correct one."
        for name in ("skip_attention", "skip_mlp"):
            setattr(self, name, sorted(distinct_layers(name, getattr(self, name), last, why)))

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        LayerSkipper(model, self.skip_attention, self.skip_mlp)  # finds every sublayer or raises
        self.draft_modules(model)

    def training_defaults(self) -> dict[str, Any]:
        if not self.draft_rank or not (self.skip_attention or self.skip_mlp):
            raise ValueError(
                f"draft_rank={self.draft_rank}, skip_attention={self.skip_attention}, skip_mlp="
                f"{self.skip_mlp}: nothing to train. What is trained are low-rank updates of a "
                "model with layers left out: give a draft_rank, such as 8, and layers to skip, "
                "such as `hf-spec search` finds. Without updates layer_skip needs no training."
            )
        return {}

    def draft_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """The linear modules that drafting runs and that get updates, by name.

        Raises:
            ValueError: the config has a rank, but no module matches.
        """
        if not self.draft_rank:
            return {}
        skipper = LayerSkipper(model, self.skip_attention, self.skip_mlp)
        left_out = {id(module) for stubbed in skipper.replaced for module in stubbed.modules()}
        chosen = linear_modules(model, self.draft_target_modules)
        found = {name: module for name, module in chosen.items() if id(module) not in left_out}
        if not found:
            raise ValueError(
                f"draft_target_modules={self.draft_target_modules!r}: drafting leaves out all "
                "linear modules of that name. Choose others, or skip less."
            )
        return found


class LayerSkipAdapter(LowRankAdapter):
    """Two factors for each linear module of the drafting path, or no weights at all.

    They apply only while drafting; the model's own outputs do not change.
    """

    def __init__(self, config: LayerSkipConfig, model: Any) -> None:
        super().__init__(config, model)
        if config.draft_rank:
            self.hold_factors(config.draft_modules(model), config.draft_rank, config.draft_alpha)


#: Tokens of a piece, about as many as a step drafts.
PIECE = 4


def loss(model: Any, adapter: Any, batch: TrainingBatch) -> dict[str, Tensor]:
    """KL divergence of the drafting model's next-token distribution from the full model's.

    Averaged over the drafted tokens of a sequence and then over sequences. A piece of
    :data:`PIECE` tokens starts after each anchor.

    Returns:
        ``loss``, a scalar; ``logits``, ``(batch, anchors, PIECE, vocab)`` of the drafting model;
        ``labels``, ``(batch, anchors, PIECE)``, the token after each drafted one.
    """
    config: Any = adapter.config
    if not config.draft_rank:
        raise ValueError("draft_rank=0: the adapter has no weights to train.")
    drafting = LayerSkipper(model, config.skip_attention, config.skip_mlp).changes
    adapter.update.add_to(drafting)
    # Like a group of probes, a piece attends causally to the tokens up to its anchor and to itself.
    group, ahead = ProbeGroup.causal(PIECE), Ahead.of(batch, PIECE, placement(model).device)
    with torch.no_grad():
        pieces = ProbeInputs(model.get_input_embeddings()(ahead.before))
    hidden = probe_sequences(
        model, batch.input_ids, batch.attention_mask, batch.anchors, group, pieces,
        while_probing=drafting,
    )  # fmt: skip
    logits = model_logits(model, hidden.probe_hidden.flatten(1, 2), drafting)
    logits = logits.unflatten(1, (-1, PIECE))
    wanted = ahead.wanted.to(logits.device)
    own = own_predictions(model, hidden.token_hidden, ahead.columns)
    return mean_loss(prediction_losses(logits, wanted, own), logits, wanted, pooled=True)
