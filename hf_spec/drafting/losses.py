"""Losses of predictions of future tokens.

At an anchor, column t of a sequence, the model itself predicts token t + 1. What drafts predicts
those after it: distance d, from 1, is token t + 1 + d. All objectives are sums of the losses of
single predictions, :func:`prediction_losses`, averaged by :func:`mean_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.module import Adapter
from hf_spec.adapters.predicting import of_tokens
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.drafting.block_diffusion.network import BlockNetwork, block_sequences
from hf_spec.drafting.draft_vocabulary import DraftVocabulary, drafted_logits, places_of
from hf_spec.drafting.heads import PROJECTION, head_states, projected
from hf_spec.drafting.markov_head import ConditionalHead, MarkovHead
from hf_spec.model.hidden_states import Head, model_logits, states_at
from hf_spec.model.sequences import IGNORED, token_hidden

#: See :func:`future_losses`.
Predict = Callable[[Tensor, Head | None], Tensor]
#: Target that is never drafted: it trains nothing, and counts as a miss in evaluation.
NEVER = -1


class Ahead(NamedTuple):
    """The tokens after anchors; each ``(batch, anchors, distances)``.

    Attributes:
        columns: t + d, where the model itself predicts the token of distance d.
        before: the tokens there, so those before the wanted ones.
        wanted: the tokens t + d + 1, `IGNORED` where there is none to predict.
    """

    columns: Tensor
    before: Tensor
    wanted: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch, count: int, device: torch.device, first: int = 1) -> Ahead:
        """Those of ``count`` distances from ``first`` on."""
        ids, labels, anchors = (one.to(device) for one in batch[:3])
        columns = anchors[:, :, None] + torch.arange(first, first + count, device=device)
        end = ids.shape[1] - 1
        at, after = (one.clamp(max=end) for one in (columns, columns + 1))
        before = ids.gather(1, at.flatten(1)).view_as(at)
        wanted = labels.gather(1, after.flatten(1)).view_as(at)
        return cls(at, before, torch.where(columns < end, wanted, IGNORED))


def prediction_losses(
    logits: Tensor, wanted: Tensor, own: Tensor | None = None, likeliest: bool = False
) -> Tensor:
    """The loss of each prediction, in float32 at least; 0 where nothing is wanted.

    Args:
        logits: ``(..., vocab)`` predictions.
        wanted: ``(...)`` target tokens; `NEVER` or `IGNORED` where nothing is wanted.
        own: ``(..., vocab)`` the model's own logits there: the loss is the KL divergence from them.
            None for cross-entropy.
        likeliest: cross-entropy of the model's likeliest tokens instead of that divergence.
    """
    flat = logits.flatten(0, -2)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    tokens = wanted.flatten()
    unwanted = tokens < 0
    if own is not None and likeliest:
        tokens, own = own.argmax(-1).flatten(), None
    tokens = tokens.masked_fill(unwanted, IGNORED)
    if own is None:
        losses = functional.cross_entropy(flat, tokens, reduction="none", ignore_index=IGNORED)
    else:
        target = own.flatten(0, -2).to(flat.dtype).log_softmax(-1)
        divergence = functional.kl_div(
            flat.log_softmax(-1), target, reduction="none", log_target=True
        ).sum(-1)
        losses = divergence.masked_fill(unwanted, 0.0)
    return losses.view(wanted.shape)


def wanted_mean(losses: Tensor, wanted: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The mean of :func:`prediction_losses` over the entries with a target; 0 if there is none."""
    return losses.sum(dim) / (wanted >= 0).sum(dim).clamp(min=1)


def mean_loss(
    losses: Tensor, logits: Tensor, labels: Tensor, decay: float = 1.0, first: int = 0,
    pooled: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """A mean over sequences of the sum over distances of their mean losses; if pooled, of the mean
    over all predictions. The n-th distance, from 0, has weight ``decay ** (first + n)``.

    Returns:
        ``loss``, a scalar; ``logits`` and ``labels``, see :func:`future_losses`.
    """
    shares = decay ** torch.arange(first, first + losses.shape[2], device=losses.device)
    if pooled:
        means = wanted_mean(losses * shares.to(losses.dtype), labels, (1, 2))
    else:
        means = (wanted_mean(losses, labels, 1) * shares).sum(-1)
    return {"loss": means.mean(), "logits": logits, "labels": labels}


def future_losses(
    model: Any,
    weights: Mapping[str, Tensor],
    states: Tensor,
    ahead: Ahead,
    own: Tensor | None = None,
    predict: Predict | None = None,
    markov_head: ConditionalHead | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of predictions at anchors, and the predictions that decoding would use.

    With a draft vocabulary, the predictions are distributions over its tokens, and others are not
    trained. With a Markov head, they are given the answer's tokens before their target.

    Args:
        weights: the adapter's parameters.
        states: ``(batch, anchors, distances, hidden)``, before the Markov head.
        own: :func:`own_logits` at ``ahead.columns``, for distillation.
        predict: logits ``(batch, n, tokens)`` from states ``(batch, n, hidden)``, n being all
            distances of all anchors, and from what replaces the output embeddings, if anything.
            None for :func:`model_logits`.
        markov_head: None for the :class:`MarkovHead` among the parameters, if there is one.

    Returns:
        ``(batch, anchors, distances)`` losses; ``(batch, anchors, distances, tokens)`` logits; and
        the targets as their indices, `NEVER` for others.
    """
    markov_head = markov_head or MarkovHead.of(weights, model)
    if markov_head is not None:
        states = markov_head.given_root(states, ahead.before[:, :, 0])
    vocabulary, flat = DraftVocabulary.of(weights, model), states.flatten(1, 2)
    wanted = drafted_targets(None if vocabulary is None else vocabulary.tokens, ahead.wanted)
    logits = drafted_logits(
        vocabulary,
        lambda head: predict(flat, head) if predict else model_logits(model, flat, head=head),
    ).unflatten(1, wanted.shape[1:])
    given = logits if markov_head is None else markov_head.along(logits, ahead.before, states)
    losses = prediction_losses(given, wanted, own)
    if markov_head is not None and markov_head.plain_share:
        losses = losses + markov_head.plain_share * prediction_losses(logits, wanted, own)
    return losses, given, wanted


def drafted_targets(tokens: Tensor | None, wanted: Tensor) -> Tensor:
    """Targets as indices among the ids that can be drafted, ``(n,)`` in ascending order, or None
    for all; `NEVER` for other tokens, and `IGNORED` as it is."""
    if tokens is None:
        return wanted
    found, known = places_of(wanted, tokens.to(wanted.device))
    return torch.where(known | (wanted == IGNORED), torch.where(known, found, wanted), NEVER)


@torch.no_grad()
def own_logits(
    model: Any, hidden: Tensor, columns: Tensor, vocabulary: DraftVocabulary | None = None
) -> Tensor:
    """The model's own logits ``(batch, anchors, distances, tokens)`` at columns ``(batch, anchors,
    distances)`` of its final states ``(batch, seq, hidden)``; see :func:`drafted_logits`."""
    states = states_at(hidden, columns.flatten(1))
    logits = drafted_logits(vocabulary, lambda head: model_logits(model, states, head=head))
    return logits.unflatten(1, columns.shape[1:])


# -- objectives of several methods ---------------------------------------------------------------


def heads_loss(
    model: Any, adapter: Adapter, batch: TrainingBatch, hidden: Tensor | None = None
) -> dict[str, Tensor]:
    """The losses of heads, weighted by decay ** k (Medusa, section 2.2.1, eq. (1)); see
    :func:`mean_loss`.

    Head k, from 1, predicts token t + 1 + k at anchor t. Own projections are trained without the
    model's scaling or soft cap of logits.

    Args:
        hidden: ``(batch, seq, hidden)`` final states, if they are known.
    """
    config, weights = adapter.config, adapter.tensors()
    if hidden is None:
        hidden = token_hidden(model, batch.input_ids, batch.attention_mask)
    ahead, own = Ahead.of(batch, config.num_heads, hidden.device), None
    if config.loss == "distillation":
        own = own_logits(model, hidden, ahead.columns, DraftVocabulary.of(weights, model))
    projections = weights.get(PROJECTION)
    if projections is not None:
        known = projections.shape[1]  # the model may have gained tokens since
        ahead = ahead._replace(wanted=ahead.wanted.masked_fill(ahead.wanted >= known, IGNORED))
        if own is not None:
            own = of_tokens(model, own[..., :known], torch.finfo(own.dtype).min)

    def predict(states: Tensor, head: Head | None) -> Tensor:
        if projections is None:
            return model_logits(model, states.to(hidden), head=head)
        each = states.unflatten(1, (-1, config.num_heads))
        return projected(model, projections, each).flatten(1, 2)

    states = head_states(weights, states_at(hidden, batch.anchors))
    losses = future_losses(model, weights, states, ahead, own, predict)
    return mean_loss(*losses, config.decay, first=1)


def block_loss(model: Any, adapter: Adapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """The losses of all distances of blocks, weighted by decay ** d (DFlash, section 3.2); see
    :func:`mean_loss`."""
    config, weights = adapter.config, adapter.tensors()
    network = BlockNetwork(model, adapter)
    states = block_sequences(network, batch.input_ids, batch.attention_mask, batch.anchors)
    ahead, own = Ahead.of(batch, config.distances, states.device), None
    if config.loss == "distillation":
        hidden = token_hidden(model, batch.input_ids, batch.attention_mask)
        vocabulary = DraftVocabulary.of(weights, model)
        own = own_logits(model, hidden, ahead.columns, vocabulary).to(states.device)

    losses = future_losses(model, weights, states, ahead, own, network.logits, network.head)
    return mean_loss(*losses, config.decay, first=1)
