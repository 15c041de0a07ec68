"""PPD's training loss: section 4.3.2, eq. (4.1)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.probes import ProbeGroup, group_tensors
from hf_spec.drafting.losses import future_losses, wanted_mean
from hf_spec.methods.ppd.probes import PromptTokens
from hf_spec.model.hidden_states import model_logits, states_at
from hf_spec.model.sequences import future_labels, probe_sequences


def loss(model: Any, adapter: ActiveAdapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """Divergence from the base's distributions, averaged per sequence and then over sequences.

    The loss of distance i has weight decay^(i-1). The base's distribution is that at the same
    position of the same sequence, from the same forward; the divergence is KL(base || prompt
    token), as in distillation and in the authors' code. With ``loss="hard"`` it is the
    cross-entropy of the sequence's token.

    Returns:
        ``loss``, a scalar; ``logits``, ``(batch, anchors, m, vocab)``; ``labels``, ``(batch,
        anchors, m)``.
    """
    input_ids, labels, anchors, attention_mask = batch
    prompts = PromptTokens(adapter)
    config = prompts.config
    group = ProbeGroup.causal(prompts.distances)
    wanted = future_labels(labels, anchors, group)  # (batch, anchors, m)
    states = probe_sequences(
        model, input_ids, attention_mask, anchors, prompts.group, prompts.inputs
    )
    device = states.probe_hidden.device
    wanted, anchors = wanted.to(device), anchors.to(device)
    made = prompts.states(states.probe_hidden.flatten(1, 2)).unflatten(1, wanted.shape[1:])
    offsets, _ = group_tensors(group, str(device))
    own = None
    if config.loss == "distillation":
        at = (anchors[:, :, None] + offsets).clamp(max=labels.shape[1] - 1)
        with torch.no_grad():
            own = model_logits(model, states_at(states.token_hidden, at.flatten(1)))
            own = own.unflatten(1, wanted.shape[1:])
    losses, logits = future_losses(
        model, prompts.weights, partial(prompts.logits, model), made, input_ids, anchors, wanted,
        own,
    )  # fmt: skip
    share = config.decay ** (offsets - 1).to(losses.dtype)
    means = wanted_mean(losses * share, wanted, (1, 2))
    return {"loss": means.mean(), "logits": logits, "labels": wanted}
