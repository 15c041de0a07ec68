"""DSpark's heads, and DFlash 2's: a change of logits by the token before, of low rank.

DSpark ("DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation",
2026) adds W2 u to the logits of a slot, where u depends on the token before it, p, and, in some
kinds, on the slot's state h and on the tokens before p::

    vanilla   u = W1[p]
    gated     u = sigmoid(G [h; W1[p]] + b) * W1[p]
    rnn       g, c, o = J [s; W1[p]; h] + b
              s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c),  u = tanh(o)
    selector  u = W1[p] * P h

The last one is DFlash 2's, which chooses among each slot's k tokens of the largest logits only.

DSpark's head of confidence says how likely a slot's likeliest token is accepted, if all before it
are: sigmoid(w [h; W1[p]] + b), or without W1[p]. Trees are grown by that.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.drafting.block_diffusion.head import BlockHead, drafted, look_up, products, scaled

#: Names of the tensors of the head of confidence.
CONFIDENCE = "confidence_head.proj.weight", "confidence_head.proj.bias"


class VanillaHead(BlockHead):
    """W1 ``(known, rank)`` and W2 ``(tokens, rank)``; logits change by W2 u.

    Attributes:
        names: of W1, W2, and of what a kind has besides.
    """

    names: ClassVar[tuple[str, ...]] = (
        "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
    )  # fmt: skip
    output = names[1]

    @classmethod
    def fresh(cls, config: Any, known: int, model: Any) -> dict[str, Tensor]:
        rank = config.markov_rank
        made = [scaled(known, rank), torch.zeros(drafted(config, known), rank)]
        return dict(zip(cls.names, made + cls.more(rank, config.hidden_size)))

    @classmethod
    def more(cls, rank: int, hidden: int) -> list[Tensor]:
        """Further tensors of a new head."""
        return []

    def given(
        self, logits: Tensor, previous: Tensor, states: Tensor, memory: Tensor | None = None,
        among: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        first, second, *more = (self.weights[name] for name in self.names)
        before = look_up(first, previous)
        states = states.to(before).expand(*before.shape[:-1], -1)
        change, memory = self.change(before, states, memory, *more)
        return logits + products(change, second, among).to(logits), memory

    def change(
        self, before: Tensor, states: Tensor, memory: Tensor | None, *more: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """u and what is remembered, both ``(..., rank)``, by rows of W1, states, what was
        remembered before, and further tensors."""
        return before, None

    def confidence(self, previous: Tensor, states: Tensor) -> Tensor | None:
        if CONFIDENCE[0] not in self.weights:
            return None
        before = look_up(self.weights[self.names[0]], previous)
        states = states.to(before).expand(*before.shape[:-1], -1)
        weight, bias = (self.weights[name] for name in CONFIDENCE)
        seen = states if weight.shape[1] == states.shape[-1] else torch.cat([states, before], -1)
        return functional.linear(seen, weight, bias)[..., 0].sigmoid()


class GatedHead(VanillaHead):
    """G ``(rank, hidden + rank)`` and its bias."""

    names = (
        *VanillaHead.names, "markov_head.gate_proj.weight", "markov_head.gate_proj.bias",
    )  # fmt: skip

    @classmethod
    def more(cls, rank: int, hidden: int) -> list[Tensor]:
        return [scaled(rank, hidden + rank), torch.zeros(rank)]

    def change(
        self, before: Tensor, states: Tensor, memory: Tensor | None, *more: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        gate = functional.linear(torch.cat([states, before], -1), *more)
        return gate.sigmoid() * before, None


class RecurrentHead(VanillaHead):
    """J ``(3 * rank, 2 * rank + hidden)`` and its bias."""

    remembers = True
    names = (
        *VanillaHead.names, "markov_head.joint_proj.weight", "markov_head.joint_proj.bias",
    )  # fmt: skip

    @classmethod
    def more(cls, rank: int, hidden: int) -> list[Tensor]:
        return [scaled(3 * rank, 2 * rank + hidden), torch.zeros(3 * rank)]

    def change(
        self, before: Tensor, states: Tensor, memory: Tensor | None, *more: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        memory = torch.zeros_like(before) if memory is None else memory
        joint = torch.cat([memory, before, states], -1)
        gate, new, out = functional.linear(joint, *more).chunk(3, -1)
        memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * new.tanh()
        return out.tanh(), memory


class Selector(VanillaHead):
    """P ``(rank, hidden)``."""

    chooses = True
    names = tuple(
        f"candidate_selector.{name}"
        for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    )
    output = names[1]

    @classmethod
    def more(cls, rank: int, hidden: int) -> list[Tensor]:
        return [scaled(rank, hidden)]

    def change(
        self, before: Tensor, states: Tensor, memory: Tensor | None, *more: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return before * functional.linear(states, *more), None
