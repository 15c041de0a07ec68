"""Predictions of a block given the tokens drafted before, level by level of a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_spec.drafting.block_diffusion.head import BlockHead
from hf_spec.drafting.grow import Children, Frontier
from hf_spec.drafting.noise import as_sampled
from hf_spec.drafting.predictions import Predictions, likeliest
from hf_spec.model.hidden_states import gather_hidden

#: Likeliest tokens of a slot whose logits heads change, if no more are asked for: all would take
#: several times as long on CPUs as the block itself.
SHORTLIST = 256


class PathPredictions(Predictions):
    """Predictions given the tokens drafted before: of a shortlist of each slot's tokens, which a
    head gives other logits. All others keep theirs.
    """

    _head: BlockHead
    states: Tensor

    def _choose(self, logits: Tensor, scores: Tensor, width: int) -> None:
        self._width, top_k = width, self._head.top_k
        self._memory: Tensor | None = None  # (batch, n, rank) after the frontier's nodes
        size = min(max(top_k or SHORTLIST, width), logits.shape[-1])
        by = scores if top_k is None else logits
        self._among = among = by.topk(size).indices  # (batch, distances, size)
        self._logits = logits.gather(-1, among)
        self._others: Tensor | None = None  # (batch, distances, 1) what all others sum up to
        if top_k is not None:
            self._logits[..., top_k:] = -torch.inf
        elif size < logits.shape[-1]:
            others = scores.scatter(-1, among, -torch.inf)
            self._others = others.to(torch.float32).logsumexp(-1, keepdim=True)
        if self._noise is not None:
            self._noise = self._noise.gather(-1, among)

    def expand(self, frontier: Frontier) -> Children | None:
        place, previous = frontier.depth, frontier.tokens
        if place >= self.distances:
            return None
        memory = self._memory if place else None
        if memory is not None:
            memory = gather_hidden(memory, frontier.parents)
        states, among = self.states[:, place, None], self._among[:, place, None]
        logits, self._memory = self._head.given(
            self._logits[:, place, None], previous, states, memory, among
        )
        if self._noise is not None:
            logits = as_sampled(logits, self._noise[:, place, None])
        others = None if self._others is None else self._others[:, place, None]
        chosen, log_probs = likeliest(logits, self._width, others)
        sure = self._head.confidence(previous, states)
        if sure is not None and self._noise is None:
            log_probs = with_confidence(log_probs, sure)
        tokens = among.expand(*chosen.shape[:-1], -1).gather(-1, chosen)
        return Children(self._named(tokens), self.where_known(log_probs, place))


def with_confidence(log_probs: Tensor, confidence: Tensor) -> Tensor:
    """Log-probabilities ``(..., width)`` of which the first, the largest, is replaced by a
    confidence ``(...)`` in [0, 1]; the others share the rest as before, none becomes the largest.
    """
    first, others = log_probs[..., :1], log_probs[..., 1:]
    # Of all other tokens together, those that are not listed included.
    among = others - torch.log1p(-first.exp().clamp(max=1 - 1e-6))
    second = among[..., :1].exp() if others.shape[-1] else torch.zeros_like(first)
    sure = confidence[..., None].to(first).clamp(max=1 - 1e-6)
    sure = torch.fmax(sure, second / (1 + second))  # also of one that has overflowed
    return torch.cat([sure.log(), among + torch.log1p(-sure)], -1)
