"""GPT-Neo's local attention by token positions, for forwards that bring a 4-D mask.

Every GPT-Neo layer cuts its scores with a triangle over *slots*; in local layers the triangle is
also a band of `config.window_size`. With padding inside the cache view, or with tree candidates
that share a position, slots are not positions and the band hides the wrong keys. Here the band
comes from positions, and the caller's mask replaces the triangle; only forwards with a 4-D mask are
touched.

This module knows this architecture, but no trees, caches or drafting: the mask determines which
slots a query sees, the caller each slot's position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from modeling_patches.alibi import Positions, is_tree
from modeling_patches.per_call import Changes, plain

MODEL_TYPES = frozenset({"gpt_neo"})


def applies(model: PreTrainedModel) -> bool:
    """Whether `model` is a GPT-Neo: global layers, too, compare slots instead of positions."""
    return model.config.model_type in MODEL_TYPES


def tree_positions(model: PreTrainedModel, positions: Positions, changes: Changes) -> None:
    """Let forwards with a 4-D mask take their bands from ``positions``, within ``changes``.

    Positions are compared once per forward; all local layers share the banded mask.
    """
    decoder, window = model.get_decoder(), model.config.window_size
    band: Tensor | None = None  # (batch, 1, query, key), additive; while a forward has a 4-D mask

    def before_model(args: tuple, kwargs: dict) -> None:
        nonlocal band
        mask, band = kwargs.get("attention_mask"), None
        if is_tree(mask):
            band = banded(mask, *positions.of(mask), window)

    def before_block(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs if band is None else kwargs | {"attention_mask": band}

    def without_triangle(attention: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        stock = plain(attention, "_attn")

        def _attn(
            query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            if band is None:
                return stock(query, key, value, attention_mask)
            mask: Any = attention_mask
            # GPT-Neo does not scale its scores, hence fp32, as in the original.
            scores = query.float() @ key.float().transpose(-1, -2)  # (batch, heads, query, key)
            scores = scores + mask.to(scores.device)  # the band stays where the first layer is
            weights = attention.attn_dropout(scores.softmax(dim=-1).to(value.dtype))
            return weights @ value, weights

        return _attn

    changes.before(decoder, before_model)
    for block in decoder.h:
        attention = block.attn.attention
        if attention.attention_type == "local":
            changes.before(block, before_block)
        changes.instead(attention, "_attn", without_triangle(attention))


def banded(mask: Tensor, query: Tensor, key: Tensor, window: int) -> Tensor:
    """`mask` (batch, 1, query, key) without the keys at a distance of the window or more."""
    outside = query[:, :, None] - key[:, None, :] >= window  # (batch, query, key)
    return mask.masked_fill(outside[:, None], torch.finfo(mask.dtype).min)
