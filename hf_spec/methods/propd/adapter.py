"""The PROPD adapter: the heads of Medusa, and the early head that prunes.

Zhong et al., "ProPD: Dynamic Token Tree Pruning and Generation for LLM Parallel Decoding" (2024),
section 4.1. The early head maps hidden states after the first layers to final ones, for the model's
own output embeddings: ``gain * rms_norm(h + A h + b)``, the form of the tuned lens (Belrose et al.,
"Eliciting Latent Predictions from Transformers with the Tuned Lens", 2023). On a 22M model, after
layer 4, its 50 likeliest tokens contain the model's own at 82 % of positions; a residual block as
in Medusa's heads reaches 73 % (docs/methods/propd.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_spec.adapters.module import Adapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import check_count, count, setting
from hf_spec.drafting.heads import HeadsAdapter, HeadsConfig
from hf_spec.drafting.losses import Ahead, heads_loss, mean_loss, own_predictions, prediction_losses
from hf_spec.model.hidden_states import gather_hidden, model_logits
from hf_spec.model.sequences import token_hidden
from hf_spec.modeling_patches.early_pruning import layer_input
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.weights import output_features

#: Default number of layers before pruning (section 5.3).
PRUNE_LAYER = 4


@dataclass
class ProPDConfig(HeadsConfig):
    """Config of a PROPD adapter."""

    type_name: ClassVar[str] = "PROPD"

    prune_layer: int | None = setting(
        None,
        "Layers that run on the whole tree; the early prediction head reads the hidden states "
        f"behind them.  [default: {PRUNE_LAYER}, or all but one where there are fewer]",
        count(),
    )
    prune_top_k: int = setting(
        50, "k: draft tokens that are not among the early head's k likeliest tokens are dropped.",
        count(),
    )  # fmt: skip

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        layers = num_layers(model)
        if layers < 2:
            raise ValueError(
                "the model has 1 layer: there are no deeper ones to leave draft tokens out of. Use "
                "medusa."
            )
        if self.prune_layer is None:
            self.prune_layer = min(PRUNE_LAYER, layers - 1)
        why = f"The model has {layers} layers, behind the last of which nothing is left to save."
        check_count("prune_layer", self.prune_layer, 1, layers - 1, why)


#: Names of the head's parameters: A (hidden, hidden), b (hidden,) and gain (hidden,).
MATRIX, BIAS, GAIN = "early_matrix", "early_bias", "early_gain"
EPSILON = 1e-6


def early_states(weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Apply the early head to hidden states, ``(..., hidden)``, in its parameters' dtype."""
    hidden = hidden.to(weights[MATRIX])
    moved = hidden + functional.linear(hidden, weights[MATRIX], weights[BIAS])
    wide = moved.to(torch.promote_types(moved.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return wide.to(moved.dtype) * weights[GAIN]


class ProPDAdapter(HeadsAdapter):
    """The parameters of the heads, and ``early_matrix`` (hidden, hidden), ``early_bias`` (hidden,)
    and ``early_gain`` (hidden,) of the early head."""

    def __init__(self, config: ProPDConfig, model: Any) -> None:
        super().__init__(config, model)
        hidden, _ = output_features(model)
        inside = model.config.get_text_config(decoder=True).hidden_size
        if inside != hidden:
            raise ValueError(
                f"{type(model).__name__} has layers of size {inside} and output embeddings of "
                f"{hidden}: an early head would have to be projected. Use medusa."
            )
        matrix, bias, gain = torch.zeros(hidden, hidden), torch.zeros(hidden), torch.ones(hidden)
        self.hold({MATRIX: matrix, BIAS: bias, GAIN: gain})


def loss(model: Any, adapter: Adapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """The heads' loss plus that of the early head, which predicts token t + 1 at each anchor t.

    With ``loss="hard"``, the latter is the cross-entropy of the answer's token, with
    ``distillation`` the KL divergence from the model's distribution: a mean over the anchors of a
    sequence, then over sequences. The early head shares no parameters with the other heads, so the
    losses need no weights.
    """
    config: Any = adapter.config
    changes = Changes()
    seen = layer_input(model, changes, config.prune_layer)
    hidden = changes.run(token_hidden, model, batch.input_ids, batch.attention_mask)
    found = heads_loss(model, adapter, batch, hidden)
    states = early_states(
        adapter.tensors(), gather_hidden(seen[0].to(hidden.device), batch.anchors)
    )
    logits = model_logits(model, states.to(hidden))[:, :, None]
    ahead = Ahead.of(batch, 1, hidden.device, first=0)
    own = own_predictions(model, hidden, ahead.columns) if config.loss == "distillation" else None
    early = mean_loss(prediction_losses(logits, ahead.wanted, own), logits, ahead.wanted)
    return {**found, "loss": found["loss"] + early["loss"]}
