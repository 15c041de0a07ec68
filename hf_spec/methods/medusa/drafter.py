"""Draft with heads on the hidden state of the last accepted token: Medusa, section 2.1."""

from __future__ import annotations

from typing import Any

from hf_spec.adapters.active import require_active
from hf_spec.methods.head_drafter import HeadDrafter
from hf_spec.methods.heads import WEIGHTS
from hf_spec.methods.medusa.options import MedusaOptions


class MedusaDrafter(HeadDrafter):
    """Trees of the heads' likeliest tokens."""

    options: MedusaOptions

    def __init__(self, model: Any, options: MedusaOptions):
        adapter = require_active(model, "MEDUSA", "medusa")
        weights = adapter.weights()
        states = options.make_states(adapter, len(weights[WEIGHTS]))
        online = options.online_trees(model, adapter, states.max_probes)
        super().__init__(model, options, weights, states, online)
