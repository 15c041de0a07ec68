"""Losses of predictions of future tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.predicting import of_tokens
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.probes import ProbeGroup
from hf_spec.drafting.draft_vocabulary import DraftVocabulary, places_of
from hf_spec.drafting.heads import PROJECTION, head_states, projected
from hf_spec.drafting.markov_head import MarkovHead
from hf_spec.model.hidden_states import Head, model_logits, states_at
from hf_spec.model.sequences import IGNORED, future_labels, token_hidden

#: Share of the loss without the previous token, if there is also a loss given that token.
PLAIN_SHARE = 0.3
#: Target that is never drafted: it trains nothing, and counts as a miss in evaluation.
NEVER = -1


def prediction_losses(logits: Tensor, wanted: Tensor, own: Tensor | None = None) -> Tensor:
    """The loss of each prediction, in float32 at least; 0 where nothing is wanted.

    Args:
        logits: ``(..., vocab)`` predictions.
        wanted: ``(...)`` target tokens; `NEVER` or `IGNORED` where nothing is wanted.
        own: ``(..., vocab)`` the model's own logits there: the loss is the KL divergence from them.
            None for cross-entropy.
    """
    flat = logits.flatten(0, -2)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    tokens = wanted.flatten()
    tokens = tokens.masked_fill(tokens < 0, IGNORED)
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
    predict: Callable[[Tensor, DraftVocabulary | None], Tensor],
    states: Tensor,
    input_ids: Tensor,
    anchors: Tensor,
    wanted: Tensor,
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of predictions at anchors, and the predictions that decoding would use.

    With a draft vocabulary, the predictions are distributions over its tokens.

    With a Markov head, the loss of a prediction is computed given the token before its target. A
    share of `PLAIN_SHARE` is computed without that token, to train the shortlists.

    Args:
        weights: the adapter's parameters.
        predict: logits ``(batch, n, vocab)`` from states ``(batch, n, hidden)``, n being all
            distances of all anchors, and from what replaces the output embeddings, if anything.
        states: ``(batch, anchors, distances, hidden)``, before the Markov head.
        input_ids: ``(batch, seq)``
        anchors: ``(batch, anchors)`` columns t; distance d, from 1, predicts token t + d + 1.
        wanted: ``(batch, anchors, distances)`` these tokens, `IGNORED` where there is none.
        own: :func:`own_logits` there, for distillation.

    Returns:
        ``(batch, anchors, distances)`` losses; ``(batch, anchors, distances, tokens)`` logits; and
        the targets as their indices, `NEVER` for others.
    """
    steps = torch.arange(1, wanted.shape[2] + 1, device=states.device)
    ids, at = input_ids.to(states.device), anchors.to(states.device)[:, :, None] + steps
    before = ids.gather(1, at.clamp(max=ids.shape[1] - 1).flatten(1)).view_as(at)
    markov_head = MarkovHead.of(weights, model)
    if markov_head is not None:
        states = markov_head.given_root(states, before[:, :, 0])
    vocabulary = DraftVocabulary.of(weights, model)
    wanted = drafted_targets(None if vocabulary is None else vocabulary.tokens, wanted)
    logits = drafted_logits(vocabulary, partial(predict, states.flatten(1, 2)))
    logits = logits.unflatten(1, wanted.shape[1:])
    losses = prediction_losses(logits, wanted, own)
    if markov_head is None:
        return losses, logits, wanted
    bias = drafted_logits(vocabulary, partial(markov_head.logits, before, states))
    given = logits + bias.to(logits)
    return PLAIN_SHARE * losses + prediction_losses(given, wanted, own), given, wanted


def drafted_targets(tokens: Tensor | None, wanted: Tensor) -> Tensor:
    """Targets as indices in a draft vocabulary, `NEVER` for other tokens.

    Args:
        tokens: ``(n,)`` ids that can be drafted, ascending; None for all.
        wanted: ``(...)`` target tokens, `IGNORED` where there is none.
    """
    if tokens is None:
        return wanted
    found, known = places_of(wanted, tokens.to(wanted.device))
    return torch.where(known | (wanted == IGNORED), torch.where(known, found, wanted), NEVER)


def drafted_logits(
    vocabulary: DraftVocabulary | None, predict: Callable[[DraftVocabulary | None], Tensor]
) -> Tensor:
    """Logits ``(..., tokens)`` of a draft vocabulary's tokens; None for all. ``predict`` gives
    those by its output embeddings, or by the model's for None."""
    if vocabulary is None:
        return predict(None)
    if vocabulary.is_of_base:
        return predict(vocabulary)
    logits = predict(None)
    return logits[..., vocabulary.tokens.to(logits.device)]


@torch.no_grad()
def own_logits(
    model: Any, hidden: Tensor, columns: Tensor, vocabulary: DraftVocabulary | None = None
) -> Tensor:
    """The model's own logits ``(batch, anchors, distances, tokens)``, for distillation.

    Args:
        hidden: ``(batch, seq, hidden)`` its final states.
        columns: ``(batch, anchors, distances)`` where, as far as the sequence goes.
        vocabulary: see :func:`drafted_logits`.
    """
    states = states_at(hidden, columns.clamp(max=hidden.shape[1] - 1).flatten(1))
    logits = drafted_logits(vocabulary, lambda head: model_logits(model, states, head=head))
    return logits.unflatten(1, columns.shape[1:])


def wanted_mean(losses: Tensor, wanted: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The mean of :func:`prediction_losses` over the entries with a target; 0 if there is none."""
    return losses.sum(dim) / (wanted >= 0).sum(dim).clamp(min=1)


def heads_loss(model: Any, adapter: ActiveAdapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """The heads' losses, weighted by decay ** k (Medusa, section 2.2.1, eq. (1)).

    A head's loss is a mean over the anchors of a sequence that it can predict from; the result is a
    mean over sequences. Head k, from 1, predicts token t + 1 + k at anchor t. Own projections are
    trained without the model's scaling or soft cap of logits.

    Returns:
        ``loss``, a scalar; ``logits`` and ``labels``, see :func:`future_losses`.
    """
    hidden = token_hidden(model, batch.input_ids, batch.attention_mask)
    return loss_of_states(model, adapter, hidden, batch)


def loss_of_states(
    model: Any, adapter: ActiveAdapter, hidden: Tensor, batch: TrainingBatch
) -> dict[str, Tensor]:
    """:func:`heads_loss` from final hidden states ``(batch, seq, hidden)``."""
    config: Any = adapter.config
    weights = adapter.weights()
    group = ProbeGroup.causal(config.num_heads)
    wanted = future_labels(batch.labels, batch.anchors, group).to(hidden.device)
    anchors = batch.anchors.to(hidden.device)
    states = head_states(weights, states_at(hidden, anchors))

    def predict(states: Tensor, head: Head | None) -> Tensor:
        if config.projection == "shared":
            return model_logits(model, states.to(hidden), head=head)
        each = states.unflatten(1, (-1, config.num_heads))
        return projected(model, weights[PROJECTION], each).flatten(1, 2)

    own = None
    if config.projection == "own":  # tokens that the heads do not have
        wanted = wanted.masked_fill(wanted >= weights[PROJECTION].shape[1], IGNORED)
    if config.loss == "distillation":
        later = anchors[:, :, None] + torch.arange(1, config.num_heads + 1, device=anchors.device)
        own = own_logits(model, hidden, later, DraftVocabulary.of(weights, model))
        if config.projection == "own":
            known = own[..., : weights[PROJECTION].shape[1]]
            own = of_tokens(model, known, torch.finfo(known.dtype).min)
    losses, logits, labels = future_losses(
        model, weights, predict, states, batch.input_ids, anchors, wanted, own
    )
    per_head = wanted_mean(losses, labels, 1)  # (batch, heads)
    shares = config.decay ** torch.arange(1, config.num_heads + 1, device=hidden.device)
    return {"loss": (per_head * shares).sum(-1).mean(), "logits": logits, "labels": labels}
