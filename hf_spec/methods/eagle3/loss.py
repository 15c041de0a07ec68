"""The training loss of an EAGLE3 adapter."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.drafting.training_time_test import chain_loss
from hf_spec.methods.eagle3.network import Eagle3Network


def loss(model: Any, adapter: ActiveAdapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """See :func:`chain_loss`."""
    config: Any = adapter.config
    network = Eagle3Network(model, adapter.module)
    return chain_loss(
        model, network, batch, config.layers, config.ttt_steps, config.decay, config.loss
    )
