"""SPACE's training loss, semi-autoregressive supervised fine-tuning: section 3.1, eqs. (1)-(4).

Each loss is a mean over the tokens it predicts, where the paper's equations have a sum. The token
y_m, which is in both sums of eq. (3), counts once.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.probes import ProbeGroup
from hf_spec.drafting.losses import future_losses, prediction_losses, wanted_mean
from hf_spec.methods.space.masks import mask_tokens, random_tokens
from hf_spec.model.hidden_states import model_logits
from hf_spec.model.sequences import IGNORED, future_labels, probe_sequences


def loss(model: Any, adapter: ActiveAdapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """Eq. (4), averaged over sequences.

    In training, the loss of a sequence is the autoregressive L_AR with probability p_ar, otherwise
    the semi-autoregressive L_SAR, averaged over its anchors; the choice is a function of its tokens
    and anchors. In evaluation, both count with these probabilities. If the model is not trained,
    the loss is that of the mask tokens alone. An anchor is y_(m-1); k mask tokens follow it.

    Returns:
        ``loss``, a scalar; unless no sequence has mask tokens, their ``logits``, ``(batch, anchors,
        k, vocab)``, and ``labels``, ``(batch, anchors, k)``.
    """
    input_ids, labels, anchors, attention_mask = batch
    config: Any = adapter.config
    frozen = not config.changes_model
    group = ProbeGroup.causal(config.num_mask_tokens)
    wanted = future_labels(labels, anchors, group)
    useful = (wanted != IGNORED).any(-1)  # (batch, anchors); padding has nothing to predict
    noise = None
    if config.masks == "noise":
        shape = (anchors.shape[1], len(group))
        seeds = [_draw(*row) for row in zip(input_ids, labels, anchors, useful)]
        noise = torch.stack([random_tokens(model, seed, *shape) for seed in seeds])
    inputs = mask_tokens(adapter, model, noise)
    share = _sar_share(config, model.training, input_ids, labels, anchors, useful)
    if not bool(share.any()):
        anchors, wanted, useful = anchors[:, :0], wanted[:, :0], useful[:, :0]
    hidden = probe_sequences(model, input_ids, attention_mask, anchors, group, inputs, frozen)

    device = hidden.token_hidden.device
    precision = torch.promote_types(hidden.token_hidden.dtype, torch.float32)
    anchors, wanted, useful, share = (x.to(device) for x in (anchors, wanted, useful, share))
    output: dict[str, Tensor] = {}
    mask_losses = hidden.token_hidden.new_zeros(wanted.shape, dtype=precision)
    if wanted.shape[1]:
        mask_losses, logits = future_losses(
            model, adapter.weights(), partial(model_logits, model), hidden.probe_hidden, input_ids,
            anchors, wanted,
        )  # fmt: skip
        output = {"logits": logits, "labels": wanted}
    sums, counts = mask_losses.sum(-1), (wanted != IGNORED).sum(-1)  # (batch, anchors)
    ar_loss = sums.new_zeros(len(wanted))
    if not frozen:
        following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).to(device)
        real = following != IGNORED  # (batch, seq)
        predicted = model_logits(model, hidden.token_hidden[real][None])[0]
        losses = sums.new_zeros(real.shape)
        losses = losses.masked_scatter(real, prediction_losses(predicted, following[real]))
        ar_loss = wanted_mean(losses, following, 1)
        # The first sum of eq. (3): the tokens up to y_m, which the anchor itself predicts.
        sums = sums + losses.cumsum(-1).gather(1, anchors)
        counts = counts + real.cumsum(-1).gather(1, anchors)
    sar_losses = torch.where(useful, sums / counts.clamp(min=1), 0.0)
    sar_loss = sar_losses.sum(-1) / useful.sum(-1).clamp(min=1)
    share = torch.where(useful.any(-1), share, 0.0)  # an answer too short for a mask token
    total = (1 - share) * ar_loss + share * sar_loss
    mean = total.mean()
    if model.training and not wanted.shape[1]:
        # Other processes have mask tokens: DDP waits for a gradient of every parameter in each.
        trained = [one for one in adapter.weights().values() if one.requires_grad]
        mean = mean + 0.0 * torch.stack([one.sum().to(mean) for one in trained]).sum()
    return {"loss": mean, **output}


def _sar_share(
    config: Any, training: bool, input_ids: Tensor, labels: Tensor, anchors: Tensor, useful: Tensor
) -> Tensor:
    """``(batch,)`` weight of L_SAR in each sequence's loss: 0 or 1 in training."""
    if not config.changes_model:
        return torch.ones(len(labels))
    if not training:
        return torch.full((len(labels),), 1.0 - config.p_ar)
    rows = zip(input_ids, labels, anchors, useful)
    return torch.tensor([_draw(*row) / 2**63 >= config.p_ar for row in rows], dtype=torch.float32)


def _draw(ids: Tensor, labels: Tensor, anchors: Tensor, useful: Tensor) -> int:
    """A pseudo-random number below 2**63, a function of a sequence and its anchors.

    It does not depend on padding or the number of processes. Anchors differ between epochs.
    """
    parts = (ids[labels != IGNORED].tolist(), anchors[useful].tolist())
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
