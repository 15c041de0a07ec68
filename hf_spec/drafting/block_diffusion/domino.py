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

from hf_spec.drafting.block_diffusion.head import BlockHead, drafted, products, scaled

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
    def fresh(cls, config: Any, known: int, model: Any) -> dict[str, Tensor]:
        hidden, rank, size = config.hidden_size, config.markov_rank, config.markov_width
        made = (
            scaled(3 * size, hidden), scaled(3 * size, size), scaled(rank, hidden + size),
            torch.zeros(drafted(config, known), rank),
        )  # fmt: skip
        return dict(zip(NAMES, made))

    def read(self, states: Tensor, last: Tensor, ahead: Tensor | None) -> Tensor:
        """With 1 for slots whose logits are corrected, and 0 for others."""
        distances = torch.arange(states.shape[2], device=states.device)
        distances = distances + self.config.sample_from_anchor
        corrected = (distances > self.config.markov_skips).to(states)
        return torch.cat([states, corrected[:, None].expand(*states.shape[:-1], 1)], -1)

    def given(
        self, logits: Tensor, previous: Tensor, states: Tensor, memory: Tensor | None = None,
        among: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        of_inputs, of_states, first, second = (self.weights[name] for name in NAMES)
        embedded = self.network.embedded(previous)
        if memory is None:
            memory = embedded.new_zeros(*embedded.shape[:-1], of_states.shape[1])
        (reset, update, new), (by_reset, by_update, by_new) = (
            functional.linear(x, matrix).chunk(3, -1)
            for x, matrix in ((embedded, of_inputs), (memory, of_states))
        )
        reset, update = (reset + by_reset).sigmoid(), (update + by_update).sigmoid()
        memory = (1 - update) * (new + reset * by_new).tanh() + update * memory
        states, corrected = states.split([states.shape[-1] - 1, 1], -1)
        both = torch.cat([states.to(memory).expand(*memory.shape[:-1], -1), memory], -1)
        change = products(functional.silu(functional.linear(both, first)), second, among)
        return logits + corrected.to(logits) * change.to(logits), memory
