"""What drafters with probes under every node share."""

from __future__ import annotations

from typing import Any

import torch

from hf_spec.core.probes import ProbeGroup, ProbeRows, hang
from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.methods.base import Drafter
from hf_spec.methods.forward import ProbeInputs, output_logits
from hf_spec.methods.probing import probe_sequences


class ProbeDrafter(Drafter):
    """Hangs a causal group of probes under every node of static trees.

    Args:
        probe_inputs: what has been learned; one embedding per probe of the group.
    """

    probe_inputs: ProbeInputs

    def __init__(self, model: Any, options: Any, probe_inputs: ProbeInputs):
        super().__init__(model, options)
        self.probe_inputs = probe_inputs
        self.group = ProbeGroup.causal(probe_inputs.embeddings.shape[0])
        self._hung: dict[TokenTree, ProbeRows] = {}

    def probes(self, tree: TokenTree, batch: TreeBatch) -> ProbeRows:
        """The probes under ``tree``, of which ``batch`` has one per row; made once per tree."""
        if tree not in self._hung:
            self._hung[tree] = hang(self.group, batch)
        return self._hung[tree]

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        last = torch.tensor([[input_ids.shape[1] - 1]], device=input_ids.device)
        with torch.no_grad():
            hidden = probe_sequences(
                self.model, input_ids, None, last, self.group, self.probe_inputs
            )
        rows = torch.cat([hidden.token_hidden[:, -1:], hidden.probe_hidden[:, 0]], dim=1)
        chain = output_logits(self.model, rows).argmax(-1).to(input_ids.device)
        candidates: Any = torch.cat([input_ids, chain], dim=1)
        return candidates, None
