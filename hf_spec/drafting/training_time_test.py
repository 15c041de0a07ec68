"""The training-time test (EAGLE-3, section 3.2): rows take the decoder's own outputs, as drafting.

In step s, from 0, the row of position t takes token x_(t+1+s) and the output of step s - 1, in step
0 the base's states of position t. It sees what a draft row sees: rows of step 0 up to t, with true
states, and those of its own chain. From step 1 on, P-EAGLE has rows of a mask token instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_spec.adapters.predicting import ObjectiveConfig
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core import mask as masks
from hf_spec.core.checks import count, setting
from hf_spec.core.limits import MAX_FUTURE
from hf_spec.drafting.autoregressive import DraftNetwork
from hf_spec.drafting.losses import (
    LIKELIEST,
    Ahead,
    Own,
    drafted_targets,
    mean_loss,
    prediction_losses,
)
from hf_spec.model.hidden_states import gather_hidden
from hf_spec.model.sequences import token_states


@dataclass
class ChainConfig(ObjectiveConfig):
    """Config of a decoder that is trained so."""

    ttt_steps: int | None = setting(
        None,
        "Steps of the training-time test. Default: 4, or the number of layers if that is larger.",
        count(1, MAX_FUTURE),
    )


class ChainRows(NamedTuple):
    """Rows, see :class:`~hf_spec.drafting.draft_cache.Rows`, behind true ones and those of chains
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
        return seen if begin is None else seen & masks.since(begin, self.at_keys)


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
