"""Losses of predictions of future tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.drafting.transition import Transition
from hf_spec.model.sequences import IGNORED

#: How much predictions count by themselves where they are also judged given the token before.
PLAIN_SHARE = 0.3


def prediction_losses(logits: Tensor, wanted: Tensor, own: Tensor | None = None) -> Tensor:
    """The loss of each prediction, in float32 at least; 0 where nothing is wanted.

    Args:
        logits: ``(..., vocab)`` predictions.
        wanted: ``(...)`` tokens that stand there, `IGNORED` where none does.
        own: ``(..., vocab)`` the model's own logits there: the loss is the KL divergence from them.
            None: cross-entropy.
    """
    flat = logits.flatten(0, -2)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    tokens = wanted.flatten()
    if own is None:
        losses = functional.cross_entropy(flat, tokens, reduction="none", ignore_index=IGNORED)
    else:
        target = own.flatten(0, -2).to(flat.dtype).log_softmax(-1)
        divergence = functional.kl_div(
            flat.log_softmax(-1), target, reduction="none", log_target=True
        ).sum(-1)
        losses = divergence.masked_fill(tokens == IGNORED, 0.0)
    return losses.view(wanted.shape)


def future_losses(
    model: Any,
    weights: Mapping[str, Tensor],
    logits: Tensor,
    states: Tensor,
    input_ids: Tensor,
    anchors: Tensor,
    wanted: Tensor,
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The losses of predictions at anchors, and the predictions as decoding makes them.

    With a transition a prediction is judged given the token that stands before its own, and, so
    that shortlists are right, to a share of `PLAIN_SHARE` without knowing it.

    Args:
        model: the base model.
        weights: the adapter's parameters.
        logits: ``(batch, anchors, distances, vocab)``
        states: ``(batch, anchors, distances, hidden)`` that they were made from.
        input_ids: ``(batch, seq)``
        anchors: ``(batch, anchors)`` columns; distance d, from 1, asks for the token d + 1 behind.
        wanted: ``(batch, anchors, distances)`` those tokens, `IGNORED` where none does.
        own: the model's own logits there, for distillation.
    """
    losses = prediction_losses(logits, wanted, own)
    transition = Transition.of(weights, model)
    if transition is None:
        return losses, logits
    ids, steps = input_ids.to(logits.device), torch.arange(1, wanted.shape[2] + 1)
    at = (anchors.to(ids.device)[:, :, None] + steps.to(ids.device)).clamp(max=ids.shape[1] - 1)
    before = ids.gather(1, at.flatten(1)).view_as(at)
    given = logits + transition.logits(before, states).to(logits)
    return PLAIN_SHARE * losses + prediction_losses(given, wanted, own), given


def wanted_mean(losses: Tensor, wanted: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The mean of :func:`prediction_losses` over the places where something is wanted; 0 without.

    Args:
        losses, wanted: of one shape.
        dim: the dimensions that the mean is taken over.
    """
    return losses.sum(dim) / (wanted != IGNORED).sum(dim).clamp(min=1)
