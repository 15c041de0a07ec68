"""Drafts with heads on the hidden state of the last accepted token: Medusa, section 2.1."""

from __future__ import annotations

from typing import Any

from hf_spec.adapters.active import require_active
from hf_spec.drafting.head_drafter import HeadDrafter
from hf_spec.drafting.heads import WEIGHTS
from hf_spec.methods.medusa.options import MedusaOptions
from hf_spec.policy.tree_source import tree_source


class MedusaDrafter(HeadDrafter):
    """Trees of the heads' likeliest tokens."""

    options: MedusaOptions

    def __init__(self, model: Any, options: MedusaOptions):
        adapter = require_active(model, "MEDUSA", "medusa")
        weights = adapter.weights()
        source = tree_source(options, model, adapter, len(weights[WEIGHTS]))
        super().__init__(model, options, weights, source)
