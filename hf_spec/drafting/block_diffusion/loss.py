"""The training loss of block drafters: blocks behind random tokens of the answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.probes import ProbeGroup
from hf_spec.drafting.block_diffusion.network import BlockNetwork, block_sequences
from hf_spec.drafting.draft_vocabulary import DraftVocabulary
from hf_spec.drafting.losses import drafted_targets, own_logits, prediction_losses, wanted_mean
from hf_spec.drafting.transitions import Transitions
from hf_spec.model.hidden_states import model_logits, output_logits
from hf_spec.model.sequences import future_labels, token_hidden
from modeling_patches.weights import placement


def block_loss(model: Any, adapter: ActiveAdapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """The losses of all distances, weighted by decay ** d (DFlash, section 3.2).

    The loss of a distance is a mean over the anchors of a sequence; the result is a mean over
    sequences. With a Markov head, the tokens before are those of the answer. Tokens outside the
    draft vocabulary are not trained.

    Returns:
        ``loss``, a scalar; ``logits`` and ``labels``, see :func:`future_losses`.
    """
    config, weights = adapter.config, adapter.weights()
    network = BlockNetwork(adapter.module, model)
    states = block_sequences(network, batch.input_ids, batch.attention_mask, batch.anchors)
    distances, device = config.distances, states.device
    group = ProbeGroup.causal(distances)
    wanted = future_labels(batch.labels, batch.anchors, group).to(device)
    ids, anchors = batch.input_ids.to(device), batch.anchors.to(device)
    later = anchors[:, :, None] + torch.arange(1, distances + 1, device=device)
    later = later.clamp(max=ids.shape[1] - 1)

    vocabulary = DraftVocabulary.of(weights, model)
    if vocabulary is not None and vocabulary.is_own:
        logits = network.shaped(functional.linear(states, adapter.module.lm_head.weight))
    elif config.shapes_logits:
        logits = network.shaped(output_logits(model, states, vocabulary))
    else:
        final = states.flatten(1, 2).to(placement(model).dtype)
        logits = model_logits(model, final, head=vocabulary)
        logits = logits.unflatten(1, states.shape[1:3])
    transitions = Transitions.of(config.markov_head, weights)
    if transitions is not None:
        before = ids.gather(1, later.flatten(1)).view_as(later)
        logits = transitions.along(logits, before, states)

    own = None
    if config.loss == "distillation":
        with torch.no_grad():
            hidden = token_hidden(model, batch.input_ids, batch.attention_mask)
        own = own_logits(model, hidden, later, vocabulary).to(device)
    wanted = drafted_targets(None if vocabulary is None else vocabulary.tokens, wanted)
    losses = prediction_losses(logits, wanted, own)
    shares = config.decay ** torch.arange(1, distances + 1, device=device)
    loss = (wanted_mean(losses, wanted, 1) * shares).sum(-1).mean()
    return {"loss": loss, "logits": logits, "labels": wanted}
