"""Draft with mask tokens that ride along in the verifying forward: BiTA, section 3.2.

Under every node hangs a group of mask tokens; the group under the last accepted node predicts the
tokens behind the next one, which are the candidates of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_spec.core.tree_states import TreeStates
from hf_spec.methods.bita.options import BitaOptions
from hf_spec.methods.bita.probes import probe_inputs
from hf_spec.methods.peft_bridge import require_active
from hf_spec.methods.probe_drafter import ProbeDrafter


class BitaDrafter(ProbeDrafter):
    """Static trees of the mask tokens' likeliest tokens."""

    options: BitaOptions

    def __init__(self, model: Any, options: BitaOptions):
        weights: Mapping[str, Tensor] = require_active(model, "BITA", "bita").weights()
        depth = options.max_depth or len(weights["masks"])
        states = TreeStates.uniform(options.make_tree(len(weights["masks"])), depth)
        used = {**weights, "masks": weights["masks"][:depth]}
        super().__init__(model, options, probe_inputs(model, used), states)
