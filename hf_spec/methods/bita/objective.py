"""BiTA's training loss: section 3.1, eq. (1)."""

from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.core.probes import ProbeGroup
from hf_spec.methods.bita.probes import probe_inputs
from hf_spec.model.hidden_states import output_logits
from hf_spec.model.sequences import IGNORED, future_labels, probe_sequences


def loss(
    model: Any,
    adapter: ActiveAdapter,
    input_ids: Tensor,
    labels: Tensor,
    anchors: Tensor,
    attention_mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """Cross-entropy of the future tokens, averaged per sequence and then over sequences.

    Args:
        model: the frozen base model.
        adapter: the adapter that is trained.
        input_ids: ``(batch, seq)`` prompts with the answers the base gave.
        labels: ``(batch, seq)`` the answers' tokens, -100 elsewhere.
        anchors: ``(batch, anchors)`` places k of the paper.
        attention_mask: ``(batch, seq)``.

    Returns:
        ``loss``, a scalar; ``logits``, ``(batch, anchors, M, vocab)``; ``labels``, ``(batch,
        anchors, M)``.
    """
    inputs = probe_inputs(model, adapter.weights())
    group = ProbeGroup.causal(inputs.embeddings.shape[0])
    hidden = probe_sequences(model, input_ids, attention_mask, anchors, group, inputs).probe_hidden
    wanted = future_labels(labels, anchors, group).to(hidden.device)
    logits = output_logits(model, hidden)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 2).float(), wanted.flatten(), reduction="none", ignore_index=IGNORED
    ).view(len(wanted), -1)
    counts = (wanted != IGNORED).flatten(1).sum(-1).clamp(min=1)
    return {"loss": (losses.sum(-1) / counts).mean(), "logits": logits, "labels": wanted}
