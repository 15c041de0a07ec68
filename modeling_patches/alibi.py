"""ALiBi from token positions, for forwards that bring a 4-D mask: Bloom, Falcon (ALiBi), MPT.

ALiBi (https://huggingface.co/papers/2108.12409) adds `slope[head] * key position` to the attention
scores. Stock models count the position from a 2-D padding mask (Bloom, Falcon: a 4-D one raises) or
take the slot index (MPT: silently wrong once siblings of a tree share a position). Here the caller
says where every key stands, and only forwards with a 4-D mask are touched.

It knows the three architectures and nothing of trees, caches or drafting: which slots a query sees
is the mask's business, where a slot stands is the caller's.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

SetPositions = Callable[[Tensor, Tensor], None]


def applies(model: PreTrainedModel) -> bool:
    """Whether `model` adds ALiBi and so needs `tree_positions` for 4-D masks."""
    if model.config.model_type == "falcon":
        return bool(model.config.alibi)  # most Falcons are rotary and need nothing
    return model.config.model_type in MODEL_TYPES


@contextmanager
def tree_positions(model: PreTrainedModel) -> Iterator[SetPositions]:
    """Patch this model instance; yields `set_positions(query_positions, key_positions)`.

    Call it with LongTensors (batch, query) and (batch, key) before every forward whose mask is 4-D:
    additive (batch, 1, query, key), 0 or `finfo(dtype).min`, in the model's dtype. Keys that no
    query attends may carry any position. Forwards with a 2-D mask or none run as they always did.

    Other patches that replace the forward of an attention (MPT) must be entered inside this one.
    """
    positions = _Positions()
    with ExitStack() as undo:
        _PATCHES[model.config.model_type](model.get_decoder(), positions, undo)
        yield positions.set


class _Positions:
    """What `set_positions` said last."""

    def __init__(self) -> None:
        self.query: Tensor | None = None  # (batch, query)
        self.key: Tensor | None = None  # (batch, key)

    def set(self, query_positions: Tensor, key_positions: Tensor) -> None:
        self.query, self.key = query_positions, key_positions

    def of(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (batch, query) and (batch, key) for a forward with this 4-D mask.

        Keys that no query attends count as position 0, as padding does in transformers: a stale
        position times a slope can overflow fp16, and inf survives the addition of the mask.
        """
        if self.query is None or self.key is None:
            raise RuntimeError(
                f"A 4-D attention mask {tuple(mask.shape)} came without positions; "
                "call set_positions(query_positions, key_positions) before the forward."
            )
        sizes = (self.query.shape[-1], self.key.shape[-1])
        if tuple(mask.shape[-2:]) != sizes or not mask.is_floating_point():
            raise ValueError(
                f"Got a {mask.dtype} mask of shape {tuple(mask.shape)} for {sizes[0]} query and "
                f"{sizes[1]} key positions; the mask must be additive (0 or finfo.min) and of "
                "shape (batch, 1, query, key) with the sizes last given to set_positions."
            )
        unseen = (mask < 0).all(dim=-2)[:, 0]  # (batch, key)
        return self.query, self.key.masked_fill(unseen, 0)


def _is_tree(mask: Any) -> TypeGuard[Tensor]:
    return isinstance(mask, Tensor) and mask.dim() == 4


def _patch_bloom(transformer: nn.Module, positions: _Positions, undo: ExitStack) -> None:
    plain: Any = transformer.build_alibi_tensor
    heads: Any = transformer.num_heads
    slopes = plain(_two_tokens(transformer), heads, torch.float32)[:, 0, 1]  # position 1: the slope

    def build_alibi_tensor(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        if not _is_tree(attention_mask):
            return plain(attention_mask, num_heads, dtype)
        _, keys = positions.of(attention_mask)
        alibi = _per_head(slopes, keys).to(dtype)  # rounded last, as the original does
        return alibi.flatten(0, 1)  # (batch * heads, 1, key)

    _replace(transformer, "build_alibi_tensor", build_alibi_tensor, undo)


def _patch_falcon(transformer: nn.Module, positions: _Positions, undo: ExitStack) -> None:
    # Falcon builds ALiBi in a function of its module, out of an instance's reach. So for a tree the
    # model is told that it has none, gets it written into the mask (its own recipe for 2-D masks)
    # and the blocks get the bias itself, which also keeps them from applying rotary embeddings.
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    config: Any = transformer.config
    heads = config.num_attention_heads
    scale = math.sqrt(config.hidden_size // heads)
    # Falcon multiplies in bf16 whatever the model's dtype; so must we, to round as it does.
    slopes = build_alibi_tensor(_two_tokens(transformer), heads, torch.bfloat16)[:, 0, 1]
    alibi: Tensor | None = None  # (batch, heads, 1, key) while a tree runs

    def before_model(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        nonlocal alibi
        mask = kwargs.get("attention_mask")
        module.use_alibi = not _is_tree(mask)
        if not _is_tree(mask):
            alibi = None
            return args, kwargs
        _, keys = positions.of(mask)
        alibi = _per_head(slopes, keys).to(mask.dtype)
        hidden = torch.finfo(mask.dtype).min
        return args, kwargs | {"attention_mask": (alibi / scale).masked_fill(mask < 0, hidden)}

    def before_block(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs if alibi is None else kwargs | {"alibi": alibi}

    _replace(transformer, "use_alibi", True, undo)  # for its undoing: before_model sets it
    hooked: Any = transformer
    for module, hook in [(hooked, before_model)] + [(block, before_block) for block in hooked.h]:
        undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _patch_mpt(transformer: nn.Module, positions: _Positions, undo: ExitStack) -> None:
    plain: Any = transformer.build_mpt_alibi_tensor
    model: Any = transformer
    slopes = -plain(model.num_heads, 2, device=model.device)[:, 0, 0]  # one before the last slot
    mask: Tensor | None = None  # the tree's, while one runs

    def before_model(module: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal mask
        mask = kwargs.get("attention_mask")

    def build_mpt_alibi_tensor(*args: Any, **kwargs: Any) -> Tensor:
        if not _is_tree(mask):
            return plain(*args, **kwargs)
        queries, keys = positions.of(mask)
        # MPT counts back from the last slot. From the root, here: a constant means nothing to
        # softmax, but small numbers near the queries keep more digits.
        return _per_head(slopes, keys - queries.amin(dim=-1, keepdim=True))

    undo.callback(model.register_forward_pre_hook(before_model, with_kwargs=True).remove)
    _replace(model, "build_mpt_alibi_tensor", build_mpt_alibi_tensor, undo)
    for block in model.blocks:
        _replace(block.attn, "forward", _mpt_attention(block.attn), undo)


def _mpt_attention(attention: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """`MptAttention.forward` that also takes a bias per row; the original insists on 3-D."""
    plain = attention.forward

    def forward(
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if position_bias.dim() != 4 or attention_mask is None:
            return plain(hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
        qkv = attention.Wqkv(hidden_states)  # (batch, query, 3 * hidden)
        if attention.clip_qkv:
            qkv = qkv.clamp(min=-attention.clip_qkv, max=attention.clip_qkv)
        split = (attention.n_heads, attention.head_dim)
        query, key, value = (x.unflatten(-1, split).transpose(1, 2) for x in qkv.chunk(3, dim=-1))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)

        scores = query @ key.transpose(-1, -2) * attention.softmax_scale + position_bias
        scores = scores.masked_fill(attention_mask, torch.finfo(query.dtype).min)
        weights = scores.float().softmax(dim=-1).to(value.dtype)  # (batch, heads, query, key)
        weights = nn.functional.dropout(weights, attention.attn_dropout_p, attention.training)
        output = (weights @ value).transpose(1, 2).flatten(2)  # (batch, query, hidden)
        return attention.out_proj(output), weights

    return forward


def _two_tokens(transformer: Any) -> Tensor:
    """A 2-D mask of two tokens: ALiBi at the second is the slope, whoever computes it."""
    return torch.ones(1, 2, dtype=torch.long, device=transformer.device)


def _per_head(slopes: Tensor, positions: Tensor) -> Tensor:
    """Bias (batch, heads, 1, key) from slopes (heads,) and positions (batch, key)."""
    return slopes.to(positions.device)[:, None, None] * positions[:, None, None, :]


def _replace(instance: nn.Module, name: str, value: Any, undo: ExitStack) -> None:
    """Set an attribute of this instance; `undo` puts back what the instance had, if anything."""
    if name in vars(instance):
        undo.callback(setattr, instance, name, vars(instance)[name])
    else:
        undo.callback(delattr, instance, name)
    setattr(instance, name, value)


_PATCHES = {"bloom": _patch_bloom, "falcon": _patch_falcon, "mpt": _patch_mpt}
MODEL_TYPES = frozenset(_PATCHES)
