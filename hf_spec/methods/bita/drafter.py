"""Draft with mask tokens that ride along in the verifying forward: BiTA, section 3.2.

Under every node hangs a group of mask tokens; the group under the last accepted node predicts the
tokens behind the next one, which are the candidates of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_spec.core.probes import ProbeGroup, ProbeRows, hang
from hf_spec.core.tree import TokenTree
from hf_spec.methods.base import DecodingState, Draft, Drafter
from hf_spec.methods.bita.options import BitaOptions
from hf_spec.methods.bita.probes import probe_inputs
from hf_spec.methods.candidates import ranked_tokens
from hf_spec.methods.forward import output_logits
from hf_spec.methods.peft_bridge import require_active
from hf_spec.methods.probing import probe_sequences


class BitaDrafter(Drafter):
    """Static trees of the mask tokens' likeliest tokens."""

    options: BitaOptions

    def __init__(self, model: Any, options: BitaOptions):
        super().__init__(model, options)
        weights: Mapping[str, Tensor] = require_active(model, "BITA", "bita").weights()
        depth = options.max_depth or len(weights["masks"])
        self.tree = options.make_tree(len(weights["masks"]))
        self.probe_inputs = probe_inputs(model, {**weights, "masks": weights["masks"][:depth]})
        self.group = ProbeGroup.causal(depth)
        self._probes: dict[TokenTree, ProbeRows] = {}

    def propose(self, state: DecodingState) -> Draft:
        tree = TokenTree.chain(0)  # nothing has been asked for yet
        tokens = state.root[:, None]
        if state.probe_hidden is not None:
            tree = self.tree.truncate(max(state.max_depth, 0))
            logits = output_logits(self.model, state.probe_hidden)
            tokens = ranked_tokens(tree, state.root, logits)
        batch = tree.batch(state.batch_size, tokens.device)
        if tree not in self._probes:
            self._probes[tree] = hang(self.group, batch)
        return Draft(batch, tokens, probes=self._probes[tree])

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        last = torch.tensor([[input_ids.shape[1] - 1]], device=input_ids.device)
        assert self.probe_inputs is not None
        with torch.no_grad():
            hidden = probe_sequences(
                self.model, input_ids, None, last, self.group, self.probe_inputs
            )
        rows = torch.cat([hidden.token_hidden[:, -1:], hidden.probe_hidden[:, 0]], dim=1)
        chain = output_logits(self.model, rows).argmax(-1).to(input_ids.device)
        candidates: Any = torch.cat([input_ids, chain], dim=1)
        return candidates, None
