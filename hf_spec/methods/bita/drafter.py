"""Drafts with mask tokens in the verifying forward: BiTA, section 3.2.

Every node has a group of mask tokens. The group under the last accepted node predicts the tokens
after the next one, which are the candidates of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_spec.adapters.active import require_active
from hf_spec.core.probes import ProbeRows
from hf_spec.core.tree import TreeBatch
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

    def hang(self, tree: TreeBatch, ahead: Sequence[Sequence[int]]) -> ProbeRows | None:
        if self.options.tree != STRAIGHTFORWARD:
            return super().hang(tree, ahead)
        count = len(self.group)
        probes = super().hang(tree, [[count] + [0] * (len(row) - 1) for row in ahead])
        assert probes is not None
        # After c accepted candidates, the first c predictions of the root's group are outdated.
        counts = count - tree.depths
        left = tuple(map(tuple, counts.tolist()))
        return replace(probes, first=tree.depths, counts=counts, sizes=left)
