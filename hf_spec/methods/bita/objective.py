"""BiTA's training loss: section 3.1, eq. (1)."""

from functools import partial
from typing import Any

from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.probes import ProbeGroup
from hf_spec.drafting.losses import future_losses, wanted_mean
from hf_spec.methods.bita.probes import probe_inputs
from hf_spec.model.hidden_states import output_logits
from hf_spec.model.sequences import future_labels, probe_sequences


def loss(model: Any, adapter: ActiveAdapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """Cross-entropy of the future tokens, averaged per sequence and then over sequences.

    Returns:
        ``loss``, a scalar; ``logits``, ``(batch, anchors, M, vocab)``; ``labels``, ``(batch,
        anchors, M)``.
    """
    weights = adapter.weights()
    inputs = probe_inputs(model, weights)
    group = ProbeGroup.causal(inputs.embeddings.shape[0])
    hidden = probe_sequences(
        model, batch.input_ids, batch.attention_mask, batch.anchors, group, inputs
    ).probe_hidden
    wanted = future_labels(batch.labels, batch.anchors, group).to(hidden.device)
    losses, logits = future_losses(
        model, weights, partial(output_logits, model), hidden, batch.input_ids, batch.anchors,
        wanted,
    )  # fmt: skip
    means = wanted_mean(losses, wanted, (1, 2))
    return {"loss": means.mean(), "logits": logits, "labels": wanted}
