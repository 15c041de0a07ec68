"""GPT-Neo's local attention by token positions, for forwards that bring a 4-D mask.

Every GPT-Neo layer cuts its scores with a triangle over *slots*; in local layers the triangle is
also a band of `config.window_size`. With padding inside the cache view, or with tree candidates
that share a position, slots are not positions and the band hides the wrong keys. Here the band
comes from positions, and the caller's mask replaces the triangle; only forwards with a 4-D mask are
touched.

This module knows this architecture, but no trees, caches or drafting: the mask determines which
slots a query sees, the caller each slot's position.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from modeling_patches.alibi import Positions, SetPositions, is_tree
from modeling_patches.per_call import Changes, plain

MODEL_TYPES = frozenset({"gpt_neo"})


def applies(model: PreTrainedModel) -> bool:
    """Whether `model` is a GPT-Neo: global layers, too, compare slots instead of positions."""
    return model.config.model_type in MODEL_TYPES


def tree_positions(model: PreTrainedModel, changes: Changes) -> SetPositions:
    """Add the patch to `changes` and return `set_positions(query_positions, key_positions)`.

    Call it with LongTensors (batch, query) and (batch, key) before every forward whose mask is 4-D:
    additive (batch, 1, query, key), 0 or `finfo(dtype).min`, in the model's dtype. Keys that no
    query attends may have any position. Forwards with a 2-D mask or none are unchanged.

    Positions are compared once per forward; all local layers share the banded mask.
    """
    decoder = model.get_decoder()
    band = _Band(model.config.window_size)
    changes.before(decoder, band.before_model)
    for block in decoder.h:
        attention = block.attn.attention
        if attention.attention_type == "local":
            changes.before(block, band.before_block)
        changes.instead(attention, "_attn", _attn(attention, band))
    return band.positions.set


class _Band:
    """The mask of local layers while a forward with a 4-D mask runs, else None."""

    def __init__(self, window_size: int) -> None:
        self.window_size = window_size
        self.mask: Tensor | None = None  # (batch, 1, query, key), additive
        self.positions = Positions()

    def before_model(self, args: tuple, kwargs: dict) -> None:
        mask = kwargs.get("attention_mask")
        self.mask = self.of(mask) if is_tree(mask) else None

    def before_block(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs if self.mask is None else kwargs | {"attention_mask": self.mask}

    def of(self, mask: Tensor) -> Tensor:
        """`mask` (batch, 1, query, key) without the keys at a distance of the window or more."""
        query, key = self.positions.of(mask)
        outside = query[:, :, None] - key[:, None, :] >= self.window_size  # (batch, query, key)
        return mask.masked_fill(outside[:, None], torch.finfo(mask.dtype).min)


def _attn(attention: Any, band: _Band) -> Callable[..., tuple[Tensor, Tensor]]:
    """`GPTNeoSelfAttention._attn` without its triangle over slots while `band` has a mask."""
    stock = plain(attention, "_attn")

    def _attn(
        query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if band.mask is None:
            return stock(query, key, value, attention_mask)
        mask: Any = attention_mask
        # GPT-Neo does not scale its scores, hence fp32, as in the original.
        scores = query.float() @ key.float().transpose(-1, -2)  # (batch, heads, query, key)
        scores = scores + mask.to(scores.device)  # the band stays where the first layer is
        weights = attention.attn_dropout(scores.softmax(dim=-1).to(value.dtype))
        return weights @ value, weights

    return _attn
