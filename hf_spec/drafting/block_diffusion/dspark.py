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

from typing import Any

import torch
from torch import Tensor

from hf_spec.drafting.block_diffusion.head import BlockHead, Shapes, drafted, look_up
from hf_spec.drafting.markov_head import Remembered

#: Names of the tensors of the head of confidence, and of those of kinds.
CONFIDENCE = "confidence_head.proj.weight", "confidence_head.proj.bias"
_TABLES = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_GATE = "markov_head.gate_proj.weight", "markov_head.gate_proj.bias"
_JOINT = "markov_head.joint_proj.weight", "markov_head.joint_proj.bias"
_CODES = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
_PROJECTION = "candidate_selector.hidden_projection.weight"


class VanillaHead(BlockHead):
    """W1 ``(known, rank)`` and W2 ``(tokens, rank)``; logits change by W2 u.

    Attributes:
        tables: names of W1 and W2.
    """

    tables = _TABLES
    output = tables[1]

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        rank = config.markov_rank
        return dict(zip(cls.tables, ((known, rank), (drafted(config, known), rank))))

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        return self._read(previous, states)[0], None

    def confidence(self, previous: Tensor, states: Tensor) -> Tensor | None:
        if CONFIDENCE[0] not in self.weights:
            return None
        before, states = self._read(previous, states)
        weight = self.weights[CONFIDENCE[0]]
        seen = states if weight.shape[1] == states.shape[-1] else torch.cat([states, before], -1)
        return self.linear(CONFIDENCE, seen)[..., 0].sigmoid()

    def _read(self, previous: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """W1[p], and h for each p."""
        before = look_up(self.weights[self.tables[0]], previous)
        return before, states.to(before).expand(*before.shape[:-1], -1)


class GatedHead(VanillaHead):
    """G ``(rank, hidden + rank)`` and its bias."""

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        rank, width = config.markov_rank, config.markov_rank + config.hidden_size
        return {**super().shapes(config, known), **dict(zip(_GATE, ((rank, width), (rank,))))}

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        before, states = self._read(previous, states)
        return self.linear(_GATE, torch.cat([states, before], -1)).sigmoid() * before, None


class RecurrentHead(VanillaHead):
    """J ``(3 * rank, 2 * rank + hidden)`` and its bias."""

    remembers = True

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        size, width = 3 * config.markov_rank, 2 * config.markov_rank + config.hidden_size
        return {**super().shapes(config, known), **dict(zip(_JOINT, ((size, width), (size,))))}

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        before, states = self._read(previous, states)
        memory = torch.zeros_like(before) if memory is None else memory
        joint = self.linear(_JOINT, torch.cat([memory, before, states], -1))
        gate, new, out = joint.chunk(3, -1)
        memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * new.tanh()
        return out.tanh(), memory


class Selector(VanillaHead):
    """P ``(rank, hidden)``."""

    chooses = True
    tables = _CODES
    output = tables[1]

    @classmethod
    def shapes(cls, config: Any, known: int) -> Shapes:
        return {
            **super().shapes(config, known),
            _PROJECTION: (config.markov_rank, config.hidden_size),
        }

    def features(self, previous: Tensor, states: Tensor, memory: Tensor | None) -> Remembered:
        before, states = self._read(previous, states)
        return before * self.linear([_PROJECTION], states), None
