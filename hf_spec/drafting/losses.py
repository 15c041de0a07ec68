"""Losses of predictions of future tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.model.sequences import IGNORED


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


def wanted_mean(losses: Tensor, wanted: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The mean of :func:`prediction_losses` over the places where something is wanted; 0 without.

    Args:
        losses, wanted: of one shape.
        dim: the dimensions that the mean is taken over.
    """
    return losses.sum(dim) / (wanted != IGNORED).sum(dim).clamp(min=1)
