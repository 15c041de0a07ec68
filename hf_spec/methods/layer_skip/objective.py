"""Trains the drafting model to predict like the full model (Draft & Verify, appendix F).

Low-rank updates of the drafting path are trained by distillation from the full model. As in
decoding, drafted tokens see the full model's keys and values: the full model runs over a sequence
once, and the drafting model runs over short pieces of it, as if they were drafted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.probes import ProbeGroup, group_tensors
from hf_spec.drafting.losses import prediction_losses, wanted_mean
from hf_spec.model.hidden_states import model_logits
from hf_spec.model.probe_inputs import ProbeInputs
from hf_spec.model.sequences import future_labels, probe_sequences
from modeling_patches.layer_skip import LayerSkipper
from modeling_patches.weights import placement

#: Tokens of a piece, about as many as a step drafts.
PIECE = 4


def loss(model: Any, adapter: ActiveAdapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """KL divergence of the drafting model's next-token distribution from the full model's.

    Averaged over the drafted tokens of a sequence and then over sequences. A piece of
    :data:`PIECE` tokens starts after each anchor.

    Returns:
        ``loss``, a scalar; ``logits``, ``(batch, anchors, PIECE, vocab)`` of the drafting model;
        ``labels``, ``(batch, anchors, PIECE)``, the token after each drafted one.
    """
    input_ids, labels, anchors, attention_mask = batch
    config: Any = adapter.config
    if not config.draft_rank:
        raise ValueError("draft_rank=0: the adapter has no weights to train.")
    layer: Any = adapter.layer
    drafting = LayerSkipper(model, config.skip_attention, config.skip_mlp).changes
    layer.updates[adapter.name].add_to(drafting)
    # Like a group of probes, a piece attends causally to the tokens up to its anchor and to itself.
    group = ProbeGroup.causal(PIECE)
    wanted = future_labels(labels, anchors, group)
    offsets, _ = group_tensors(group, str(anchors.device))
    places = (anchors[:, :, None] + offsets).clamp(max=input_ids.shape[1] - 1).flatten(1)
    with torch.no_grad():
        embed = model.get_input_embeddings()
        tokens = input_ids.gather(1, places).to(placement(model).device)
        pieces = ProbeInputs(embed(tokens).unflatten(1, (-1, PIECE)))
    hidden = probe_sequences(
        model, input_ids, attention_mask, anchors, group, pieces, while_probing=drafting
    )
    drafted = model_logits(model, hidden.probe_hidden.flatten(1, 2), drafting)
    with torch.no_grad():
        columns = places.to(drafted.device)[:, :, None]
        width = hidden.token_hidden.shape[-1]
        full = model_logits(model, hidden.token_hidden.gather(1, columns.expand(-1, -1, width)))
    wanted, logits = wanted.to(drafted.device), drafted.unflatten(1, (-1, PIECE))
    losses = prediction_losses(logits, wanted, full.view_as(logits))
    means = wanted_mean(losses, wanted, (1, 2))
    return {"loss": means.mean(), "logits": logits, "labels": wanted}
