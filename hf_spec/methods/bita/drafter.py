"""Draft with mask tokens that ride along in the verifying forward: BiTA, section 3.2.

Under every node hangs a group of mask tokens; the group under the last accepted node predicts the
tokens behind the next one, which are the candidates of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_spec.core.tree import TokenTree
from hf_spec.methods.base import DecodingState, Draft
from hf_spec.methods.bita.options import BitaOptions
from hf_spec.methods.bita.probes import probe_inputs
from hf_spec.methods.candidates import ranked_tokens
from hf_spec.methods.forward import output_logits
from hf_spec.methods.peft_bridge import require_active
from hf_spec.methods.probe_drafter import ProbeDrafter


class BitaDrafter(ProbeDrafter):
    """Static trees of the mask tokens' likeliest tokens."""

    options: BitaOptions

    def __init__(self, model: Any, options: BitaOptions):
        weights: Mapping[str, Tensor] = require_active(model, "BITA", "bita").weights()
        depth = options.max_depth or len(weights["masks"])
        self.tree = options.make_tree(len(weights["masks"]))
        used = {**weights, "masks": weights["masks"][:depth]}
        super().__init__(model, options, probe_inputs(model, used))

    def propose(self, state: DecodingState) -> Draft:
        tree = TokenTree.chain(0)  # nothing has been asked for yet
        tokens = state.root[:, None]
        if state.probe_hidden is not None:
            tree = self.tree.truncate(max(state.max_depth, 0))
            logits = output_logits(self.model, state.probe_hidden)
            tokens = ranked_tokens(tree, state.root, logits)
        batch = tree.batch(state.batch_size, tokens.device)
        return Draft(batch, tokens, probes=self.probes(tree, batch))
