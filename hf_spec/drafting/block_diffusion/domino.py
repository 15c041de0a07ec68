"""Domino's head: a recurrent state over the drafted tokens corrects the logits of a block.

"Domino" (arXiv 2605.29707), as SpecForge trains it. With the input embedding e of the token before
and the state h of a slot::

    s <- GRU(e, s), from 0 at the root
    logits += P2 silu(P1 [h; s])

The first ``markov_skips`` distances keep the block's own logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.drafting.block_diffusion.head import BlockHead, Shapes, drafted
from hf_spec.drafting.markov_head import Remembered

#: Names of the GRU's matrices for embeddings and states, of P1 and of P2.
NAMES = (
    "prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight",
    "embed_proj.2.weight",
)  # fmt: skip


class Domino(BlockHead):
    """``(3 * size, hidden)`` and ``(3 * size, size)``, whose rows are those of the reset and update
    gates and of the new state, P1 ``(rank, hidden + size)`` and P2 ``(tokens, rank)``."""

    output = NAMES[3]
    remembers = True
    plain_share = 1.0

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        hidden, rank, size = config.hidden_size, config.markov_rank, config.markov_width
        first, second = (rank, hidden + size), (drafted(config, known), rank)
        return dict(zip(NAMES, ((3 * size, hidden), (3 * size, size), first, second)))

    def read(self, states: Tensor, last: Tensor, ahead: Tensor | None) -> Tensor:
        """With 1 for slots whose logits are corrected, and 0 for others."""
        distances = torch.arange(states.shape[2], device=states.device)
        distances = distances + self.config.sample_from_anchor
        corrected = (distances > self.config.markov_skips).to(states)
        return torch.cat([states, corrected[:, None].expand(*states.shape[:-1], 1)], -1)

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        of_inputs, of_states, first, _ = (self.weights[name] for name in NAMES)
        embedded = self.network.embedded(previous)
        if memory is None:
            memory = embedded.new_zeros(*embedded.shape[:-1], of_states.shape[1])
        flat = embedded.flatten(0, -2), memory.flatten(0, -2)
        memory = torch.gru_cell(*flat, of_inputs, of_states).view_as(memory)
        states, corrected = states.split([states.shape[-1] - 1, 1], -1)
        both = torch.cat([states.to(memory).expand(*memory.shape[:-1], -1), memory], -1)
        return corrected.to(memory) * functional.silu(functional.linear(both, first)), memory
