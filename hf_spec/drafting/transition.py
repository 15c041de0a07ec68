"""Transition: how the previous token changes the prediction at a distance.

Probes and heads predict all distances at once, each without knowing the token before it. The
transition changes the state h that a distance is predicted from, given the previous token x::

    h + U silu(V e(x) + S h)

e(x) is the base model's embedding of x, scaled to root mean square 1; all distances share the
matrices. This adds the bias w(y) . U silu(V e(x) + S h) to the logits, where w(y) is the base's
output embedding of y. The base model's embeddings are reused, and the matrices do not grow with the
vocabulary. It is a low-rank Hydra head (Ankner et al., "Hydra: Sequentially-Dependent Draft Heads
for Medusa Decoding", 2024) that looks one token back, applied to a shortlist of tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.predicting import AFTER, BEFORE, STATE
from hf_spec.drafting.made_once import made_once
from hf_spec.drafting.root_correction import unit_embeddings
from hf_spec.model.hidden_states import linear_logits
from modeling_patches.weights import input_features, placement

#: Tokens whose embeddings are projected at once.
AT_ONCE = 8192


class Transition:
    """Applies an adapter's transition; gradients flow to its parameters.

    Args:
        weights: the adapter's parameters: V ``(rank, embedding)``, S ``(rank, hidden)`` and U
            ``(hidden, rank)``.
        model: the base model, whose embeddings are used.
    """

    def __init__(self, weights: Mapping[str, Tensor], model: Any):
        self.before, self.state, self.after = weights[BEFORE], weights[STATE], weights[AFTER]
        self.model = model
        #: The tables, once they are needed.
        self._made: _Tables | None = None

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], model: Any) -> Transition | None:
        """The transition among an adapter's parameters, if it has one."""
        return cls(weights, model) if BEFORE in weights else None

    def made(self) -> dict[str, Tensor]:
        """The tensors that :meth:`bias` reads, by name."""
        return {f"{name} table": table for name, table in self._tables()._asdict().items()}

    def using(self, made: Mapping[str, Tensor]) -> Transition:
        """A copy that reads these tensors in place of :meth:`made`."""
        own = copy.copy(self)
        own._made = _Tables(*(made[f"{name} table"] for name in _Tables._fields))
        return own

    def logits(self, previous: Tensor, states: Tensor) -> Tensor:
        """The bias of all tokens.

        Args:
            previous: ``(...)`` previous tokens.
            states: ``(..., hidden)`` that give the logits to which the bias is added.

        Returns:
            ``(..., vocab)``
        """
        return linear_logits(self.model, self.change(previous, states))

    def change(self, previous: Tensor, states: Tensor) -> Tensor:
        """What is added to the states, ``(..., hidden)``; see :meth:`logits`."""
        inner = functional.silu(self._embedded(previous) + self._projected(states))
        return functional.linear(inner, self.after)

    def bias(self, previous: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
        """The bias of a few tokens, given each of several previous tokens.

        Args:
            previous: ``(batch, distances, n)`` previous tokens.
            states: ``(batch, distances, hidden)`` that the distances are predicted from.
            tokens: ``(batch, distances, width)``

        Returns:
            ``(batch, distances, n, width)``
        """
        before, after = self._tables()
        device = before.device
        states = self._projected(states)[:, :, None].to(device)
        inner = functional.silu(functional.embedding(previous.to(device), before) + states)
        rows = functional.embedding(tokens.to(device), after)
        return inner @ rows.transpose(-1, -2)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """V e(x), ``(..., rank)``, of tokens ``(...)``."""
        return functional.linear(unit_embeddings(self.model, tokens).to(self.before), self.before)

    def _projected(self, states: Tensor) -> Tensor:
        """S h, ``(..., rank)``."""
        return functional.linear(states.to(self.state), self.state)

    @torch.no_grad()
    def _tables(self) -> _Tables:
        """V e(x) and U w(y) of all tokens, computed once: a step needs about a thousand of them."""
        if self._made is not None:
            return self._made
        modules = self.model.get_input_embeddings(), self.model.get_output_embeddings()

        def make() -> _Tables:
            (known, _), device = input_features(self.model), placement(self.model).device
            ids = torch.arange(known, device=device)
            before = torch.cat([self._embedded(some) for some in ids.split(AT_ONCE)])
            return _Tables(
                before, linear_logits(self.model, self.after.T).T.to(before).contiguous()
            )

        self._made = made_once(self.before, (self.after, *modules), make)
        return self._made


class _Tables(NamedTuple):
    """``(vocab, rank)`` each."""

    before: Tensor
    after: Tensor
