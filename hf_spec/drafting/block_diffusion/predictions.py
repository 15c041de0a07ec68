"""Predictions of a block given the tokens drafted before, level by level of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_spec.drafting.block_diffusion.head import BlockHead
from hf_spec.drafting.grow import Children, Frontier
from hf_spec.drafting.noise import as_sampled
from hf_spec.drafting.predictions import Predictions, likeliest
from hf_spec.model.hidden_states import states_at


class PathPredictions(Predictions):
    """Predictions given the tokens drafted before, each by all logits of its distance.

    Args:
        markov_head: how the tokens before change the predictions.
        logits, width, known, states, ids, noise: see :class:`Predictions`.
    """

    def __init__(
        self, logits: Tensor, width: int, known: Sequence[int] | Tensor, markov_head: BlockHead,
        states: Tensor, ids: Tensor | None = None, noise: Tensor | None = None,
    ):  # fmt: skip
        self._prepare(logits, known, ids, noise)
        self._logits, self._head, self._hidden, self._width = logits, markov_head, states, width
        self._memory: Tensor | None = None  # (batch, n, rank) after the frontier's nodes

    def expand(self, frontier: Frontier) -> Children | None:
        place, previous = frontier.depth, frontier.tokens
        if place >= self.distances:
            return None
        memory = self._memory if place else None
        if memory is not None:
            memory = states_at(memory, frontier.parents)
        states = self._hidden[:, place, None]
        logits, self._memory = self._head.given(
            self._logits[:, place, None], previous, states, memory
        )
        if self._noise is not None:
            logits = as_sampled(logits, self._noise[:, place, None])
        chosen, log_probs = likeliest(logits, self._width)
        sure = self._head.confidence(previous, states)
        if sure is not None and self._noise is None:
            log_probs = with_confidence(log_probs, sure)
        tokens = chosen if self._ids is None else self._ids[chosen]
        return Children(tokens, self.where_known(log_probs, place))


def with_confidence(log_probs: Tensor, confidence: Tensor) -> Tensor:
    """Log-probabilities ``(..., width)`` of which the first, the largest, is replaced by a
    confidence ``(...)`` in [0, 1]; the others share the rest as before, none becomes the largest.
    """
    first, others = log_probs[..., :1], log_probs[..., 1:]
    # Of all other tokens together, those that are not listed included.
    among = others - torch.log1p(-first.exp().clamp(max=1 - 1e-6))
    second = among[..., :1].exp() if others.shape[-1] else torch.zeros_like(first)
    sure = confidence[..., None].to(first).clamp(max=1 - 1e-6)
    sure = torch.maximum(sure, second / (1 + second))
    return torch.cat([sure.log(), among + torch.log1p(-sure)], -1)
