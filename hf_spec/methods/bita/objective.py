"""BiTA's training loss: section 3.1, eq. (1)."""

from typing import Any

from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.core.probes import ProbeGroup
from hf_spec.drafting.losses import future_losses, wanted_mean
from hf_spec.methods.bita.probes import probe_inputs
from hf_spec.model.hidden_states import output_logits
from hf_spec.model.sequences import future_labels, probe_sequences


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
        input_ids: ``(batch, seq)`` prompts with the base's answers.
        labels: ``(batch, seq)`` the answers' tokens, -100 elsewhere.
        anchors: ``(batch, anchors)`` columns of ``input_ids``, k in the paper.
        attention_mask: ``(batch, seq)``, 0 for padding.

    Returns:
        ``loss``, a scalar; ``logits``, ``(batch, anchors, M, vocab)``; ``labels``, ``(batch,
        anchors, M)``.
    """
    weights = adapter.weights()
    inputs = probe_inputs(model, weights)
    group = ProbeGroup.causal(inputs.embeddings.shape[0])
    hidden = probe_sequences(model, input_ids, attention_mask, anchors, group, inputs).probe_hidden
    wanted = future_labels(labels, anchors, group).to(hidden.device)
    logits = output_logits(model, hidden)
    losses, logits = future_losses(model, weights, logits, hidden, input_ids, anchors, wanted)
    means = wanted_mean(losses, wanted, (1, 2))
    return {"loss": means.mean(), "logits": logits, "labels": wanted}
