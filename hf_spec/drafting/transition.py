"""Transition: how the token before changes what is predicted for a distance.

Probes and heads predict all distances at once, each without knowing which token stands before it.
The transition adds, to the logits of distance d, a low-rank function of that token and of the state
the distance is predicted from::

    bias(y | x, h) = after[y] . silu(before[x] + state h)

the same for all distances. Without ``state`` that is a bigram table of rank r, the "Markov head"
of semi-autoregressive drafters; with it, it is what Hydra's heads do (Ankner et al., "Hydra:
Sequentially-Dependent Draft Heads for Medusa Decoding", 2024), on a shortlist of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.predicting import AFTER, BEFORE, STATE


class Transition:
    """Puts an adapter's transition to use; gradients reach its parameters.

    Args:
        weights: the adapter's parameters.
    """

    def __init__(self, weights: Mapping[str, Tensor]):
        self.before, self.after = weights[BEFORE], weights[AFTER]
        self.state = weights[STATE]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> Transition | None:
        """The transition among an adapter's parameters, if it has one."""
        return cls(weights) if BEFORE in weights else None

    def project(self, states: Tensor) -> Tensor:
        """The share of the states ``(..., hidden)`` in :meth:`inner`, ``(..., rank)``."""
        return functional.linear(states.to(self.state), self.state)

    def inner(self, previous: Tensor, projected: Tensor) -> Tensor:
        """silu(before[x] + state h), ``(..., rank)``."""
        return functional.silu(self.before[previous] + projected)

    def logits(self, previous: Tensor, states: Tensor) -> Tensor:
        """The bias of all tokens.

        Args:
            previous: ``(...)`` tokens before.
            states: ``(..., hidden)`` from which the logits are made that it is added to.

        Returns:
            ``(..., vocab)``
        """
        return functional.linear(self.inner(previous, self.project(states)), self.after)

    def shortlist(self, tokens: Tensor, states: Tensor) -> Shortlist:
        """For the bias of a few tokens per distance.

        Args:
            tokens: ``(batch, distances, width)``.
            states: ``(batch, distances, hidden)``.
        """
        return Shortlist(self, tokens, states)


class Shortlist:
    """The bias of a few tokens at each distance; made by :meth:`Transition.shortlist`."""

    def __init__(self, transition: Transition, tokens: Tensor, states: Tensor):
        self._transition = transition
        self._after = transition.after[tokens].transpose(-1, -2)  # (batch, distances, rank, width)
        self._projected = transition.project(states)

    def bias(self, distance: int, previous: Tensor) -> Tensor:
        """``(batch, n, width)`` for tokens before a distance, ``previous`` (batch, n)."""
        inner = self._transition.inner(previous, self._projected[:, distance - 1, None])
        return inner @ self._after[:, distance - 1]
