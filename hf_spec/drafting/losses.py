"""Losses of predictions of future tokens.

At an anchor, column t of a sequence, the model itself predicts token t + 1. What drafts predicts
those after it: distance d, from 1, is token t + 1 + d. All objectives are sums of the losses of
single predictions, :func:`prediction_losses`, averaged by :func:`mean_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.predicting import of_tokens
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.drafting.block_diffusion.network import BlockNetwork, block_sequences
from hf_spec.drafting.draft_vocabulary import DraftVocabulary, places_of
from hf_spec.drafting.heads import PROJECTION, head_states, projected
from hf_spec.drafting.markov_head import MarkovHead
from hf_spec.drafting.transitions import Transitions
from hf_spec.model.hidden_states import Head, model_logits, output_logits, states_at
from hf_spec.model.sequences import IGNORED, token_hidden
from modeling_patches.weights import placement

#: Share of the loss without the previous token, if there is also a loss given that token.
PLAIN_SHARE = 0.3
#: Target that is never drafted: it trains nothing, and counts as a miss in evaluation.
NEVER = -1


class Ahead(NamedTuple):
    """The tokens after anchors; each ``(batch, anchors, distances)``.

    Attributes:
        columns: t + d, where the model itself predicts the token of distance d, as far as the
            sequence goes.
        before: the tokens there, so those before the wanted ones.
        wanted: the tokens t + d + 1, `IGNORED` where there is none to predict.
    """

    columns: Tensor
    before: Tensor
    wanted: Tensor

    @classmethod
    def of(
        cls, batch: TrainingBatch, distances: int, device: torch.device, first: int = 1
    ) -> Ahead:
        """Those of distances from ``first`` on."""
        ids, labels, anchors = (one.to(device) for one in batch[:3])
        steps = torch.arange(first, first + distances, device=device)
        end = ids.shape[1] - 1
        columns = anchors[:, :, None] + steps

        def at(values: Tensor, columns: Tensor) -> Tensor:
            return values.gather(1, columns.clamp(max=end).flatten(1)).view_as(columns)

        wanted = torch.where(columns < end, at(labels, columns + 1), IGNORED)
        return cls(columns.clamp(max=end), at(ids, columns), wanted)


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


def mean_loss(
    losses: Tensor, logits: Tensor, labels: Tensor, decay: float = 1.0, first: int = 0,
    pooled: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """A mean over sequences: of a sequence, the sum over distances of their mean losses.

    Args:
        losses: ``(batch, anchors, distances)`` of :func:`prediction_losses`.
        logits, labels: predictions and targets, which are given back.
        decay: the n-th distance, from 0, has weight ``decay ** (first + n)``.
        pooled: one mean over all predictions of a sequence, instead of one for each distance.

    Returns:
        ``loss``, a scalar; ``logits`` and ``labels``.
    """
    shares = decay ** torch.arange(first, first + losses.shape[2], device=losses.device)
    if pooled:
        means = wanted_mean(losses * shares.to(losses.dtype), labels, (1, 2))
    else:
        means = (wanted_mean(losses, labels, 1) * shares).sum(-1)
    return {"loss": means.mean(), "logits": logits, "labels": labels}


def wanted_mean(losses: Tensor, wanted: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The mean of :func:`prediction_losses` over the entries with a target; 0 if there is none."""
    return losses.sum(dim) / (wanted >= 0).sum(dim).clamp(min=1)


def future_losses(
    model: Any,
    weights: Mapping[str, Tensor],
    states: Tensor,
    ahead: Ahead,
    own: Tensor | None = None,
    predict: Callable[[Tensor, Head | None], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of predictions at anchors, and the predictions that decoding would use.

    With a draft vocabulary, the predictions are distributions over its tokens.

    With a Markov head, the loss of a prediction is computed given the token before its target. A
    share of `PLAIN_SHARE` is computed without that token, to train the shortlists.

    Args:
        weights: the adapter's parameters.
        states: ``(batch, anchors, distances, hidden)``, before the Markov head.
        ahead: what follows the anchors.
        own: :func:`own_logits` there, for distillation.
        predict: logits ``(batch, n, vocab)`` from states ``(batch, n, hidden)``, n being all
            distances of all anchors, and from what replaces the output embeddings, if anything.
            None for :func:`model_logits`.

    Returns:
        ``(batch, anchors, distances)`` losses; ``(batch, anchors, distances, tokens)`` logits; and
        the targets as their indices, `NEVER` for others.
    """
    markov_head = MarkovHead.of(weights, model)
    if markov_head is not None:
        states = markov_head.given_root(states, ahead.before[:, :, 0])
    vocabulary = DraftVocabulary.of(weights, model)
    wanted = drafted_targets(None if vocabulary is None else vocabulary.tokens, ahead.wanted)
    flat = states.flatten(1, 2)
    logits = drafted_logits(
        vocabulary,
        lambda head: predict(flat, head) if predict else model_logits(model, flat, head=head),
    ).unflatten(1, wanted.shape[1:])
    losses = prediction_losses(logits, wanted, own)
    if markov_head is None:
        return losses, logits, wanted
    bias = drafted_logits(vocabulary, partial(markov_head.logits, ahead.before, states))
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
        columns: ``(batch, anchors, distances)`` where.
        vocabulary: see :func:`drafted_logits`.
    """
    states = states_at(hidden, columns.flatten(1))
    logits = drafted_logits(vocabulary, lambda head: model_logits(model, states, head=head))
    return logits.unflatten(1, columns.shape[1:])


# -- objectives of several methods ---------------------------------------------------------------


def heads_loss(
    model: Any, adapter: ActiveAdapter, batch: TrainingBatch, hidden: Tensor | None = None
) -> dict[str, Tensor]:
    """The losses of heads, weighted by decay ** k (Medusa, section 2.2.1, eq. (1)).

    Head k, from 1, predicts token t + 1 + k at anchor t. Own projections are trained without the
    model's scaling or soft cap of logits.

    Args:
        hidden: ``(batch, seq, hidden)`` final states, if they are known.

    Returns:
        See :func:`mean_loss`.
    """
    config: Any = adapter.config
    weights = adapter.weights()
    if hidden is None:
        hidden = token_hidden(model, batch.input_ids, batch.attention_mask)
    ahead = Ahead.of(batch, config.num_heads, hidden.device)
    states = head_states(weights, states_at(hidden, batch.anchors))
    own = None
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

    losses, logits, labels = future_losses(model, weights, states, ahead, own, predict)
    return mean_loss(losses, logits, labels, config.decay, first=1)


def block_loss(model: Any, adapter: ActiveAdapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """The losses of all distances of blocks, weighted by decay ** d (DFlash, section 3.2).

    With a Markov head, the tokens before are those of the answer. Tokens outside the draft
    vocabulary are not trained.

    Returns:
        See :func:`mean_loss`.
    """
    config, weights = adapter.config, adapter.weights()
    network = BlockNetwork(adapter.module, model)
    states = block_sequences(network, batch.input_ids, batch.attention_mask, batch.anchors)
    ahead = Ahead.of(batch, config.distances, states.device)
    vocabulary = DraftVocabulary.of(weights, model)
    if vocabulary is not None and vocabulary.is_own:
        logits = network.shaped(functional.linear(states, adapter.module.lm_head.weight))
    elif config.shapes_logits:
        logits = network.shaped(output_logits(model, states, vocabulary))
    else:
        final = states.flatten(1, 2).to(placement(model).dtype)
        logits = model_logits(model, final, head=vocabulary).unflatten(1, states.shape[1:3])
    transitions = Transitions.of(config.markov_head, weights)
    if transitions is not None:
        logits = transitions.along(logits, ahead.before, states)
    own = None
    if config.loss == "distillation":
        hidden = token_hidden(model, batch.input_ids, batch.attention_mask)
        own = own_logits(model, hidden, ahead.columns, vocabulary).to(logits.device)
    wanted = drafted_targets(None if vocabulary is None else vocabulary.tokens, ahead.wanted)
    losses = prediction_losses(logits, wanted, own)
    return mean_loss(losses, logits, wanted, config.decay, first=1)
