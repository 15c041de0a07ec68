"""ProPD's training loss: Medusa's, and that of the early head (section 4.1)."""

from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.drafting.heads import loss_of_states
from hf_spec.drafting.losses import prediction_losses, wanted_mean
from hf_spec.methods.propd.early_head import early_states
from hf_spec.model.hidden_states import model_logits, states_at
from hf_spec.model.sequences import IGNORED, token_hidden
from modeling_patches.early_pruning import layer_input
from modeling_patches.per_call import Changes


def loss(model: Any, adapter: ActiveAdapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """The heads' loss plus that of the early head, which predicts token t + 1 at each anchor t.

    With ``loss="hard"``, the latter is the cross-entropy of the answer's token, with
    ``distillation`` the KL divergence from the model's distribution: a mean over the anchors of a
    sequence, then over sequences. The early head shares no parameters with the other heads, so the
    losses need no weights.

    Returns:
        ``loss``, a scalar; ``logits`` and ``labels`` of the heads, as in Medusa's loss.
    """
    config: Any = adapter.config
    changes = Changes()
    seen = layer_input(model, changes, config.prune_layer)
    hidden = changes.run(token_hidden, model, batch.input_ids, batch.attention_mask)
    found = loss_of_states(model, adapter, hidden, batch)
    anchors, labels = batch.anchors.to(hidden.device), batch.labels.to(hidden.device)
    states = early_states(adapter.weights(), states_at(seen[0].to(hidden.device), anchors))
    logits = model_logits(model, states.to(hidden))
    inside = anchors + 1 < labels.shape[1]
    wanted = labels.gather(1, (anchors + 1).clamp(max=labels.shape[1] - 1))
    wanted = torch.where(inside, wanted, IGNORED)
    own = None
    if config.loss == "distillation":
        with torch.no_grad():
            own = model_logits(model, states_at(hidden, anchors))
    early = wanted_mean(prediction_losses(logits, wanted, own), wanted, 1)
    return {**found, "loss": found["loss"] + early.mean()}
