"""ALiBi from token positions, for forwards that bring a 4-D mask: Bloom, Falcon (ALiBi), MPT.

ALiBi (https://huggingface.co/papers/2108.12409) adds `slope[head] * key position` to the attention
scores. Stock models count the position from a 2-D padding mask (Bloom, Falcon: a 4-D one raises) or
take the slot index (MPT: silently wrong once siblings of a tree share a position). Here the caller
provides every key's position, and only forwards with a 4-D mask are changed.

This module knows the three architectures, but no trees, caches or drafting: the mask determines
which slots a query sees, the caller each slot's position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modeling_patches.cache_name import cache_in
from modeling_patches.per_call import Changes, plain


def applies(model: PreTrainedModel) -> bool:
    """Whether `model` adds ALiBi and so needs `tree_positions` for 4-D masks."""
    if model.config.model_type == "falcon":
        return bool(model.config.alibi)  # most Falcons are rotary and need nothing
    return model.config.model_type in MODEL_TYPES


def tree_positions(model: PreTrainedModel, positions: Positions, changes: Changes) -> None:
    """Let forwards with a 4-D mask take their biases from ``positions``, within ``changes``."""
    _PATCHES[model.config.model_type](model.get_decoder(), positions, changes)


class Positions:
    """The positions of the tokens and keys of the next forward, for models that need both.

    Keys that no query attends may have any position. Forwards with a 2-D mask or none need none.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, ...] = ()

    def set(self, query_positions: Tensor, key_positions: Tensor) -> None:
        """To be called with ``(batch, query)`` and ``(batch, key)`` before each forward whose mask
        is 4-D: additive ``(batch, 1, query, key)``, 0 or negative, in the model's dtype."""
        self._last = query_positions, key_positions

    def of(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (batch, query) and (batch, key) for a forward with this 4-D mask.

        Keys that no query attends count as position 0, as padding does in transformers: a stale
        position times a slope can overflow fp16, and inf survives the addition of the mask.
        """
        sizes = [positions.shape[-1] for positions in self._last]
        if list(mask.shape[-2:]) != sizes or not mask.is_floating_point():
            raise ValueError(
                f"a {mask.dtype} mask of shape {tuple(mask.shape)} came with {sizes} query and key "
                "positions: it must be additive, (batch, 1, query, key), with the sizes given to "
                "set_positions before the forward."
            )
        query, key = self._last
        return query, key.masked_fill((mask < 0).all(dim=-2)[:, 0], 0)


def is_tree(mask: Any) -> TypeGuard[Tensor]:
    """Whether a forward has a 4-D mask, so that positions are needed."""
    return isinstance(mask, Tensor) and mask.dim() == 4


def _patch_bloom(transformer: Any, positions: Positions, changes: Changes) -> None:
    stock = plain(transformer, "build_alibi_tensor")
    heads = transformer.num_heads
    slopes = stock(_two_tokens(transformer), heads, torch.float32)[:, 0, 1]  # position 1: the slope

    def build_alibi_tensor(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        if not is_tree(attention_mask):
            return stock(attention_mask, num_heads, dtype)
        _, keys = positions.of(attention_mask)
        alibi = _per_head(slopes, keys).to(dtype)  # rounded last, as the original does
        return alibi.flatten(0, 1)  # (batch * heads, 1, key)

    changes.instead(transformer, "build_alibi_tensor", build_alibi_tensor)


def _patch_falcon(transformer: Any, positions: Positions, changes: Changes) -> None:
    # Falcon builds ALiBi from a 2-D mask in a module-level function, which an instance cannot
    # change. So for a tree, that mask is all ones, and the blocks receive the bias itself and a
    # mask that contains it (as Falcon does) instead of what the model computes.
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    config = transformer.config
    heads = config.num_attention_heads
    scale = math.sqrt(config.hidden_size // heads)
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
        hidden = torch.finfo(mask.dtype).min
        tree["alibi"] = alibi
        tree["attention_mask"] = (alibi / scale).masked_fill(mask < 0, hidden)
        past = cache_in(kwargs)
        length = mask.shape[-2] + (0 if past is None else past.get_seq_length())
        return args, kwargs | {"attention_mask": keys.new_ones(keys.shape[0], length)}

    def before_block(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | tree

    changes.before(transformer, before_model)
    for block in transformer.h:
        changes.before(block, before_block)


def _patch_mpt(transformer: Any, positions: Positions, changes: Changes) -> None:
    stock = plain(transformer, "build_mpt_alibi_tensor")
    # One before the last slot.
    slopes = -stock(transformer.num_heads, 2, device=transformer.device)[:, 0, 0]
    mask: Tensor | None = None  # the tree's, while one runs

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
        changes.instead(block.attn, "forward", _mpt_attention(block.attn))


def _mpt_attention(attention: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """`MptAttention.forward` that also takes a 4-D bias, one per sequence."""
    stock = plain(attention, "forward")

    def forward(
        hidden_states: Tensor,
        position_bias: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if position_bias.dim() != 4 or attention_mask is None:
            return stock(hidden_states, position_bias, attention_mask=attention_mask, **kwargs)
        qkv = attention.Wqkv(hidden_states)  # (batch, query, 3 * hidden)
        if attention.clip_qkv:
            qkv = qkv.clamp(min=-attention.clip_qkv, max=attention.clip_qkv)
        split = (attention.n_heads, attention.head_dim)
        query, key, value = (x.unflatten(-1, split).transpose(1, 2) for x in qkv.chunk(3, dim=-1))
        cache = cache_in(kwargs)
        if cache is not None:
            key, value = cache.update(key, value, attention.layer_idx)

        scores = query @ key.transpose(-1, -2) * attention.softmax_scale + position_bias
        scores = scores.masked_fill(attention_mask, torch.finfo(query.dtype).min)
        weights = scores.float().softmax(dim=-1).to(value.dtype)  # (batch, heads, query, key)
        weights = nn.functional.dropout(weights, attention.attn_dropout_p, attention.training)
        output = (weights @ value).transpose(1, 2).flatten(2)  # (batch, query, hidden)
        return attention.out_proj(output), weights

    return forward


def _two_tokens(transformer: Any) -> Tensor:
    """A 2-D mask of two tokens: every implementation's ALiBi at the second is the slope."""
    return torch.ones(1, 2, dtype=torch.long, device=transformer.device)


def _per_head(slopes: Tensor, positions: Tensor) -> Tensor:
    """Bias (batch, heads, 1, key) from slopes (heads,) and positions (batch, key)."""
    return slopes.to(positions.device)[:, None, None] * positions[:, None, None, :]


_PATCHES = {"bloom": _patch_bloom, "falcon": _patch_falcon, "mpt": _patch_mpt}
MODEL_TYPES = frozenset(_PATCHES)
