"""Losses of drafters, and training over their own drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_spec.adapters.config import ObjectiveConfig, of_tokens
from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import MAX_FUTURE, count, setting
from hf_spec.core.tree import since
from hf_spec.predict.blocks import BlockNetwork, block_sequences
from hf_spec.predict.markov import (
    ConditionalHead,
    DraftVocabulary,
    MarkovHead,
    drafted_logits,
    places_of,
)
from hf_spec.predict.network import DraftNetwork
from hf_spec.predict.table import PROJECTION, head_states, projected
from hf_spec.target.hidden_states import Head, gather_hidden, model_logits
from hf_spec.target.sequences import IGNORED, token_hidden, token_states

# -- Losses of predictions of future tokens --------------------------------------------------------
#
# At an anchor, column t of a sequence, the model itself predicts token t + 1. What drafts predicts
# those after it: distance d, from 1, is token t + 1 + d. All objectives are sums of the losses of
# single predictions, :func:`prediction_losses`, averaged by :func:`mean_loss`.

#: See :func:`future_losses`.
Predict = Callable[[Tensor, Head | None], Tensor]
#: Target that is never drafted: it trains nothing, and counts as a miss in evaluation.
NEVER = -1
#: Tokens of each of the base's distributions that are kept for distillation.
LIKELIEST = 64
#: Part of a probability that D-PACE sets to 1, its alpha.
SMOOTHING = 0.5


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


class Own(NamedTuple):
    """What the model itself predicts.

    Attributes:
        probabilities: ``(..., k)`` of some tokens, of sum 1 or less.
        tokens: ``(..., k)`` int64, their indices among the predicted ones; None if these are all.
    """

    probabilities: Tensor
    tokens: Tensor | None = None

    @classmethod
    def at(cls, columns: Tensor, likeliest: Sequence[Tensor], drafted: Tensor | None) -> Own:
        """Those at columns ``(batch, anchors, distances)`` of sequences, of tokens that can be
        drafted, by the probabilities and tokens of :func:`token_states`; the rest of the
        probability is not there."""
        shape = columns.shape[1:]
        chances, ids = (
            gather_hidden(part, columns.flatten(1)).unflatten(1, shape).to(columns.device)
            for part in likeliest
        )
        places = drafted_targets(drafted, ids.long())
        return cls(chances.masked_fill(places < 0, 0.0), places.clamp(min=0))


def prediction_losses(logits: Tensor, wanted: Tensor, own: Own | None = None) -> Tensor:
    """The loss of each prediction, in float32 at least; 0 where nothing is wanted.

    Args:
        logits: ``(..., vocab)`` predictions.
        wanted: ``(...)`` target tokens; `NEVER` or `IGNORED` where nothing is wanted.
        own: the model's own distributions there: the loss is the KL divergence from them. None for
            cross-entropy.
    """
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    losses = -log_probs.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    if own is not None:
        target = own.probabilities.to(log_probs)
        if own.tokens is not None:
            log_probs = log_probs.gather(-1, own.tokens)
        losses = (torch.xlogy(target, target) - target * log_probs).sum(-1)
    return losses.masked_fill(wanted < 0, 0.0)


def wanted_mean(losses: Tensor, wanted: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The mean of :func:`prediction_losses` over the entries with a target; 0 if there is none."""
    return losses.sum(dim) / (wanted >= 0).sum(dim).clamp(min=1)


def mean_loss(
    losses: Tensor, logits: Tensor, labels: Tensor, decay: float | None = 1.0, first: int = 0,
    pooled: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """A mean over sequences of the sum over distances of their mean losses; if pooled, of the mean
    over all predictions. The n-th distance, from 0, has weight ``decay ** (first + n)``, or that of
    :func:`dynamic_weights` if ``decay`` is None.

    Returns:
        ``loss``, a scalar; ``logits`` and ``labels``, see :func:`future_losses`.
    """
    if decay is None:
        shares = dynamic_weights(losses, labels)
    else:
        shares = decay ** torch.arange(first, first + losses.shape[2], device=losses.device)
    means = wanted_mean(losses * shares.to(losses.dtype), labels, (1, 2) if pooled else 1)
    loss = means.mean() if pooled else means.sum(-1).mean()
    return {"loss": loss, "logits": logits, "labels": labels}


@torch.no_grad()
def dynamic_weights(losses: Tensor, wanted: Tensor) -> Tensor:
    """Weights of predictions by what they add to the expected number of accepted tokens, ``(batch,
    anchors, distances)``: the sum over this and all later distances of the smoothed probability
    that all tokens up to there are accepted (D-PACE; Wu et al., 2026, eqs. (7) and (8)).

    Args:
        losses, wanted: see :func:`prediction_losses`; exp(-loss) counts as the probability. A loss
            is below 0 where some of the model's own distribution is not there.
    """
    sure = losses.clamp(min=0).neg().exp().masked_fill(wanted == NEVER, 0.0)
    sure = SMOOTHING + (1 - SMOOTHING) * sure
    reached = sure.cumprod(-1).masked_fill(wanted == IGNORED, 0.0)
    return reached.flip(-1).cumsum(-1).flip(-1)


def future_losses(
    model: Any,
    weights: Mapping[str, Tensor],
    states: Tensor,
    ahead: Ahead,
    own: Own | None = None,
    predict: Predict | None = None,
    markov_head: ConditionalHead | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of predictions at anchors, and the predictions that decoding would use.

    With a draft vocabulary, the predictions are distributions over its tokens, and others are not
    trained. With a Markov head, they are given the answer's tokens before their target.

    Args:
        weights: the adapter's parameters.
        states: ``(batch, anchors, distances, hidden)``, before the Markov head.
        own: see :func:`prediction_losses`; at ``ahead.columns``.
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
def own_predictions(
    model: Any, hidden: Tensor, columns: Tensor, vocabulary: DraftVocabulary | None = None
) -> Own:
    """The model's own distributions over all tokens, or those of a draft vocabulary, at columns
    ``(batch, anchors, distances)`` of its final states ``(batch, seq, hidden)``."""
    states = gather_hidden(hidden, columns.flatten(1))
    logits = drafted_logits(vocabulary, lambda head: model_logits(model, states, head=head))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return Own(logits.softmax(-1).unflatten(1, columns.shape[1:]))


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
        own = own_predictions(model, hidden, ahead.columns, DraftVocabulary.of(weights, model))
    projections = weights.get(PROJECTION)
    if projections is not None:
        known = projections.shape[1]  # the model may have gained tokens since
        ahead = ahead._replace(wanted=ahead.wanted.masked_fill(ahead.wanted >= known, IGNORED))
        if own is not None:
            own = Own(of_tokens(model, own.probabilities[..., :known], 0.0))

    def predict(states: Tensor, head: Head | None) -> Tensor:
        if projections is None:
            return model_logits(model, states.to(hidden), head=head)
        each = states.unflatten(1, (-1, config.num_heads))
        return projected(model, projections, each).flatten(1, 2)

    states = head_states(weights, gather_hidden(hidden, batch.anchors))
    losses = future_losses(model, weights, states, ahead, own, predict)
    return mean_loss(*losses, config.decay, first=1)


def block_loss(model: Any, adapter: Adapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """The losses of all distances of blocks, see :func:`mean_loss`; with fixed weights, that of
    distance d has decay ** d (DFlash, section 3.2)."""
    config, weights = adapter.config, adapter.tensors()
    network = BlockNetwork(model, adapter)
    likeliest = LIKELIEST if config.loss == "distillation" else 0
    features, *kept = token_states(
        model, batch.input_ids, batch.attention_mask, config.layers, likeliest
    )
    states = block_sequences(
        network, batch.input_ids, batch.attention_mask, batch.anchors, features
    )
    ahead, own = Ahead.of(batch, config.distances, states.device), None
    if kept:
        vocabulary = DraftVocabulary.of(weights, model)
        own = Own.at(ahead.columns, kept, None if vocabulary is None else vocabulary.tokens)
    losses = future_losses(model, weights, states, ahead, own, network.logits, network.head)
    return mean_loss(*losses, config.decay, first=1)


# --------------------------------------------------------------------------------------------------
# The training-time test (EAGLE-3, section 3.2): rows take the decoder's own outputs, as drafting.
#
# In step s, from 0, the row of position t takes token x_(t+1+s) and the output of step s - 1, in
# step 0 the base's states of position t. It sees what a draft row sees: rows of step 0 up to t,
# with true states, and those of its own chain. From step 1 on, P-EAGLE has rows of a mask token
# instead.


@dataclass
class ChainConfig(ObjectiveConfig):
    """Config of a decoder that is trained so."""

    ttt_steps: int | None = setting(
        None,
        "Steps of the training-time test. Default: 4, or the number of layers if that is larger.",
        count(1, MAX_FUTURE),
    )


class ChainRows(NamedTuple):
    """Rows, see :class:`~hf_spec.predict.network.Rows`, behind true ones and those of chains
    that begin at some of them.

    Attributes:
        at_keys: ``(batch, slots)`` positions of all rows, these included.
        visible: ``(batch, n, slots)`` bool, what of them these see.
    """

    positions: Tensor
    at_keys: Tensor
    visible: Tensor

    def mask(self, begin: Tensor | None = None, window: int | None = None) -> Tensor:
        seen = self.visible[:, None]
        return seen if begin is None else seen & since(begin, self.at_keys)


def unrolled(
    network: DraftNetwork, input_ids: Tensor, states: Tensor, anchors: Tensor, steps: int,
    attention_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Logits ``(batch, anchors, steps, tokens)`` of chains that follow the text.

    Args:
        states: ``(batch, seq, features)`` of the base, see :attr:`Drafter.reads`.
        anchors: ``(batch, anchors)`` columns t at which chains begin: step s, from 0, predicts
            token t + 2 + s.
        steps: length of the chains, from 1.
        attention_mask: 0 for padding; None for no padding.
    """
    device, (batch, seq) = states.device, input_ids.shape
    ids, anchors = input_ids.to(device), anchors.to(device)
    real = torch.ones_like(ids) if attention_mask is None else attention_mask.to(device)
    real = real.bool()
    columns = torch.arange(seq, device=device)
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    causal = columns[None, :] <= columns[:, None]
    seen = (causal & real[:, None]) | torch.eye(seq, dtype=torch.bool, device=device)
    cache, hidden, at_keys = DynamicCache(), network.features(states), positions
    tokens, rows = ids.roll(-1, 1), ChainRows(positions, positions, seen)
    outputs, after = network.run_true(tokens, hidden, None, rows, cache)
    found, hidden = [gather_hidden(outputs, anchors)], gather_hidden(after, anchors)
    count = anchors.shape[1]
    true = (columns <= anchors[:, :, None]) & real[:, None]  # (batch, anchors, seq)
    own = torch.eye(count, dtype=torch.bool, device=device).expand(batch, -1, -1)
    masked = None if network.masks is None else network.masks(batch, count)
    mask, at = true, positions.gather(1, anchors)
    for step in range(1, steps):
        mask = torch.cat([mask, own], -1)
        at_keys = torch.cat([at_keys, at + step], -1)
        if masked is not None:
            tokens, hidden = masked
        else:
            tokens = ids.gather(1, (anchors + 1 + step).clamp(max=seq - 1))
        rows = ChainRows(at + step, at_keys, mask)
        outputs, hidden = network.run(tokens, hidden, rows, cache)
        found.append(outputs)
    return network.logits(torch.stack(found, 2))


def chain_loss(
    model: Any, network: DraftNetwork, batch: TrainingBatch, config: Any, layers: Sequence[int] = ()
) -> dict[str, Tensor]:  # fmt: skip
    """Loss of the predictions of all steps, weighted by decay ** s.

    Targets are the base's distributions over the draft vocabulary.

    Args:
        config: a :class:`ChainConfig`.
        layers: whose states the network reads, see :class:`Reads`; empty for the final ones.

    Returns:
        See :func:`mean_loss`; labels are indices in the draft vocabulary.
    """
    steps: int = config.ttt_steps
    likeliest = LIKELIEST if config.loss == "distillation" else 0
    states, *kept = token_states(
        model, batch.input_ids, batch.attention_mask, tuple(layers), likeliest
    )
    anchors = batch.anchors.to(states.device)
    logits = unrolled(network, batch.input_ids, states, anchors, steps, batch.attention_mask)
    ahead = Ahead.of(batch, steps, logits.device)
    own = Own.at(ahead.columns, kept, network.token_ids) if kept else None
    wanted = drafted_targets(network.token_ids, ahead.wanted)
    losses = prediction_losses(logits, wanted, own)
    return mean_loss(losses, logits, wanted, config.decay)
