"""ALiBi by given positions: Bloom, Falcon, MPT; see :mod:`.positions`.

ALiBi (https://huggingface.co/papers/2108.12409) adds to the attention scores ``slope[head] * key
position``. Bloom and Falcon raise an error for a 4-D mask, MPT takes slots for positions.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modeling_patches.cache_name import CACHE
from modeling_patches.given_positions import Positions, is_tree
from modeling_patches.per_call import Changes, plain


def bloom(transformer: Any, positions: Positions, changes: Changes) -> None:
    stock = plain(transformer, "build_alibi_tensor")
    slopes = stock(_two_tokens(transformer), transformer.num_heads, torch.float32)[:, 0, 1]

    def build_alibi_tensor(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        if not is_tree(attention_mask):
            return stock(attention_mask, num_heads, dtype)
        _, keys = positions.of(attention_mask)
        alibi = _per_head(slopes, keys).to(dtype)  # rounded last, as the original does
        return alibi.flatten(0, 1)  # (batch * heads, 1, key)

    changes.instead(transformer, "build_alibi_tensor", build_alibi_tensor)


def falcon(transformer: Any, positions: Positions, changes: Changes) -> None:
    # Falcon builds ALiBi from a 2-D mask in a module-level function, which an instance cannot
    # change. So for a tree, that mask is all ones, and the blocks receive the bias itself and a
    # mask that contains it (as Falcon does) instead of what the model computes.
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    heads = transformer.config.num_attention_heads
    scale = math.sqrt(transformer.config.hidden_size // heads)
    # Falcon multiplies in bf16 whatever the model's dtype; the rounding must be the same here.
    slopes = build_alibi_tensor(_two_tokens(transformer), heads, torch.bfloat16)[:, 0, 1]
    tree: dict[str, Tensor] = {}  # what the blocks get while a tree runs

    def before_model(args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        mask = kwargs.get("attention_mask")
        tree.clear()
        if not is_tree(mask):
            return None
        _, keys = positions.of(mask)
        alibi = _per_head(slopes, keys).to(mask.dtype)  # (batch, heads, 1, key)
        tree["alibi"] = alibi
        tree["attention_mask"] = (alibi / scale).masked_fill(mask < 0, torch.finfo(mask.dtype).min)
        cache = kwargs.get(CACHE)
        length = mask.shape[-2] + (0 if cache is None else cache.get_seq_length())
        return args, kwargs | {"attention_mask": keys.new_ones(keys.shape[0], length)}

    changes.before(transformer, before_model)
    for block in transformer.h:
        changes.before(block, lambda args, kwargs: (args, kwargs | tree))


def mpt(transformer: Any, positions: Positions, changes: Changes) -> None:
    stock = plain(transformer, "build_mpt_alibi_tensor")
    # MPT's ALiBi is 0 in the last slot, and minus the slope in the one before.
    slopes = -stock(transformer.num_heads, 2, device=transformer.device)[:, 0, 0]
    mask: Tensor | None = None  # that of the running forward

    def before_model(args: tuple, kwargs: dict) -> None:
        nonlocal mask
        mask = kwargs.get("attention_mask")

    def build_mpt_alibi_tensor(*args: Any, **kwargs: Any) -> Tensor:
        if not is_tree(mask):
            return stock(*args, **kwargs)
        queries, keys = positions.of(mask)
        # MPT counts back from the last slot, this from the root: softmax ignores a constant, but
        # small numbers near the queries keep more precision.
        return _per_head(slopes, keys - queries.amin(dim=-1, keepdim=True))

    changes.before(transformer, before_model)
    changes.instead(transformer, "build_mpt_alibi_tensor", build_mpt_alibi_tensor)
    for block in transformer.blocks:
        changes.instead(block.attn, "forward", partial(_mpt_attention, block.attn))


def _mpt_attention(
    attention: Any, hidden_states: Tensor, position_bias: Tensor,
    attention_mask: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`MptAttention.forward` that also takes a 4-D bias, which differs between sequences."""
    if position_bias.dim() != 4 or attention_mask is None:
        stock = plain(attention, "forward")
        return stock(hidden_states, position_bias, attention_mask=attention_mask, **kwargs)
    qkv = attention.Wqkv(hidden_states)  # (batch, query, 3 * hidden)
    if attention.clip_qkv:
        qkv = qkv.clamp(min=-attention.clip_qkv, max=attention.clip_qkv)
    split = (attention.n_heads, attention.head_dim)
    query, key, value = (x.unflatten(-1, split).transpose(1, 2) for x in qkv.chunk(3, dim=-1))
    cache = kwargs.get(CACHE)
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)

    scores = query @ key.transpose(-1, -2) * attention.softmax_scale + position_bias
    scores = scores.masked_fill(attention_mask, torch.finfo(query.dtype).min)
    weights = scores.float().softmax(dim=-1).to(value.dtype)  # (batch, heads, query, key)
    weights = nn.functional.dropout(weights, attention.attn_dropout_p, attention.training)
    output = (weights @ value).transpose(1, 2).flatten(2)  # (batch, query, hidden)
    return attention.out_proj(output), weights


def _two_tokens(transformer: Any) -> Tensor:
    """A 2-D mask of two tokens: the original ALiBi at the second is the slope."""
    return torch.ones(1, 2, dtype=torch.long, device=transformer.device)


def _per_head(slopes: Tensor, positions: Tensor) -> Tensor:
    """Bias (batch, heads, 1, key) from slopes (heads,) and positions (batch, key)."""
    return slopes.to(positions.device)[:, None, None] * positions[:, None, None, :]
