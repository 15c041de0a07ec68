"""xPress' head: a small causal mixer over the slots of a block and the tokens before them.

"xPress" (arXiv 2608.02438), as speculators trains it. With the state h_k of slot k, the mean m of
all slots' and the token p_k before it::

    a_k = I [D h_k; E m; T[p_k]]
    a_k += sum over j <= k of mix_kj * a_j,  channel by channel
    a_k += SwiGLU(a_k)
    logits += O a_k

There, the block is refined several times at once, from its own tokens. Here each token follows
those before it, which is what that converges to, and what trees need. Where the root's slot drafts
nothing, it takes part in the sum, with the token ahead of the root before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.drafting.block_diffusion.head import BlockHead, Shapes, drafted, look_up
from hf_spec.drafting.markov_head import Remembered


def _name(part: str) -> str:
    return f"refiner_head.{part}" + ".weight" * (part != "mix_l")


class XPress(BlockHead):
    """T ``(known, rank)``, D and E ``(rank, hidden)``, I ``(rank, 3 * rank)``, mix ``(rank,
    block_size, block_size)``, the SwiGLU's three, and O ``(tokens, rank)``."""

    output = _name("readout")
    remembers = True
    reads_ahead = True
    plain_share = 0.6

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        hidden, rank, width = config.hidden_size, config.markov_rank, config.markov_width
        size, out = config.block_size, drafted(config, known)
        parts = {
            "token_embed": (known, rank), "down_h": (rank, hidden), "down_g": (rank, hidden),
            "in_proj": (rank, 3 * rank), "mix_l": (rank, size, size), "mlp_gate": (width, rank),
            "mlp_up": (width, rank), "mlp_down": (rank, width), "readout": (out, rank),
        }  # fmt: skip
        return {_name(part): shape for part, shape in parts.items()}

    def read(self, states: Tensor, last: Tensor, ahead: Tensor | None) -> Tensor:
        """With each slot's part of a_k, and what the root's slot adds to the sum."""
        rank, mean = self.config.markov_rank, states.mean(2, keepdim=True).expand(states.shape)
        parts = torch.cat([self._linear("down_h", states), self._linear("down_g", mean)], -1)
        inner = functional.linear(parts, self._matrix("in_proj")[:, : 2 * rank])
        added = torch.zeros_like(inner)
        if not self.config.sample_from_anchor:
            assert ahead is not None
            first = inner[:, :, 0] + self._of_token(ahead)
            added = self._matrix("mix_l")[:, :, 0].T * first[:, :, None]
        return torch.cat([states, inner, added], -1)

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        rank, first = self.config.markov_rank, int(not self.config.sample_from_anchor)
        *_, inner, added = states.split([states.shape[-1] - 2 * rank, rank, rank], -1)
        own = self._of_token(previous) + inner
        memory = own if memory is None else torch.cat([memory, own], -1)
        path = memory.unflatten(-1, (-1, rank))  # of all slots of the path
        slot = first + path.shape[-2] - 1
        mixed = (self._matrix("mix_l")[:, slot, first : slot + 1].T * path).sum(-2)
        own = own + added + mixed
        gate = functional.silu(self._linear("mlp_gate", own)) * self._linear("mlp_up", own)
        return own + self._linear("mlp_down", gate), memory

    def _matrix(self, name: str) -> Tensor:
        return self.weights[_name(name)]

    def _linear(self, name: str, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self._matrix(name))

    def _of_token(self, tokens: Tensor) -> Tensor:
        """The part of a_k that the token before gives."""
        rank = self.config.markov_rank
        found = look_up(self._matrix("token_embed"), tokens)
        return functional.linear(found, self._matrix("in_proj")[:, 2 * rank :])
