"""Root correction: how the root changes the predictions of all distances.

Probes and heads predict before the model has chosen its own next token, the root of the next tree.
That token is known when candidates are chosen, and often it is one that was not foreseen. The
correction changes the state h_d that distance d is predicted from, given the root x::

    h_d + U_d silu(V_d e(x) + S_d h_d)

e(x) is the base model's embedding of x, scaled to root mean square 1. Unlike a transition, which
rescores a shortlist for each of many possible tokens, it is computed once per row and comes before
the shortlist.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.predicting import ROOT, ROOT_AFTER, ROOT_BEFORE, ROOT_STATE
from modeling_patches.weights import placement


class RootCorrection:
    """Applies an adapter's root correction; gradients flow to its parameters.

    Args:
        weights: the adapter's parameters: V ``(distances, rank, embedding)``, S ``(distances, rank,
            hidden)`` and U ``(distances, hidden, rank)``.
        model: the base model, whose embeddings are used.
    """

    def __init__(self, weights: Mapping[str, Tensor], model: Any):
        self.weights = {name: weights[name] for name in ROOT}
        self.model = model

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], model: Any) -> RootCorrection | None:
        """The correction among an adapter's parameters, if it has one."""
        return cls(weights, model) if ROOT_BEFORE in weights else None

    def made(self) -> dict[str, Tensor]:
        """The tensors that :meth:`__call__` reads, by name."""
        return dict(self.weights)

    def using(self, made: Mapping[str, Tensor]) -> RootCorrection:
        """A copy that reads these tensors in place of :meth:`made`."""
        own = copy.copy(self)
        own.weights = {name: made[name] for name in ROOT}
        return own

    def __call__(self, states: Tensor, root: Tensor) -> Tensor:
        """The corrected states.

        Args:
            states: ``(..., distances, hidden)``, of the first distances.
            root: ``(...)`` tokens.

        Returns:
            ``(..., distances, hidden)`` in the dtype of the states.
        """
        before, state, after = (
            self.weights[name][: states.shape[-2]] for name in (ROOT_BEFORE, ROOT_STATE, ROOT_AFTER)
        )
        embedding = unit_embeddings(self.model, root).to(before)
        inner = functional.linear(embedding, before.flatten(0, 1)).unflatten(-1, before.shape[:2])
        inner = inner + torch.einsum("...dh,drh->...dr", states.to(state), state)
        moved = torch.einsum("...dr,dhr->...dh", functional.silu(inner), after)
        return states + moved.to(states)


def unit_embeddings(model: Any, tokens: Tensor) -> Tensor:
    """e(x), the model's embeddings of tokens ``(...)``, scaled to root mean square 1: ``(...,
    embedding)``, in float32 at least and without gradients."""
    embeddings = model.get_input_embeddings()
    with torch.no_grad():
        made = embeddings(tokens.to(placement(model).device))
        made = made.to(torch.promote_types(made.dtype, torch.float32))
        return functional.rms_norm(made, made.shape[-1:], eps=1e-12)
