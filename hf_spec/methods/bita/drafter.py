"""Drafts with mask tokens in the verifying forward: BiTA, section 3.2.

Every node has a group of mask tokens. The group under the last accepted node predicts the tokens
after the next one, which are the candidates of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_spec.adapters.active import require_active
from hf_spec.core.tree import Tree
from hf_spec.drafting.probe_drafter import ProbeDrafter
from hf_spec.methods.bita.options import STRAIGHTFORWARD, BitaOptions
from hf_spec.methods.bita.probes import probe_inputs
from hf_spec.policy.tree_source import tree_source


class BitaDrafter(ProbeDrafter):
    """Trees of the mask tokens' likeliest tokens."""

    options: BitaOptions

    def __init__(self, model: Any, options: BitaOptions):
        adapter = require_active(model, "BITA", "bita")
        weights: Mapping[str, Tensor] = adapter.weights()
        source = tree_source(options, model, adapter, len(weights["masks"]), probes=1)
        used = {**weights, "masks": weights["masks"][: source.max_depth]}
        super().__init__(model, options, probe_inputs(model, used), source, weights)

    def attach_probes(self, tree: Tree, ahead: Sequence[Sequence[int]]) -> Tree:
        if self.options.tree != STRAIGHTFORWARD:
            return super().attach_probes(tree, ahead)
        count = len(self.group)
        probed = super().attach_probes(tree, [[count] + [0] * (len(row) - 1) for row in ahead])
        # After c accepted draft tokens, the first c predictions of the root's group are outdated.
        return probed.changed(first_probe=tree.depths, probe_counts=count - tree.depths)
