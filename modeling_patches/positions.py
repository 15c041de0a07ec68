"""Positions of tokens where a model takes none, for forwards with a 4-D mask.

These architectures compute positions from a 2-D padding mask or from slots of the KV cache, which
siblings of a draft tree make wrong. Here the caller gives the position of every query and key, and
the mask determines which slots a query sees. Forwards without a 4-D mask are not changed.

* Bloom, Falcon with ALiBi, MPT: ALiBi (https://huggingface.co/papers/2108.12409) adds to the
  attention scores ``slope[head] * key position``. Bloom and Falcon raise an error for a 4-D mask,
  MPT takes slots for positions.
* GPT-Neo: a triangle over slots hides keys, and in local layers also those outside of a window.
* Llama 4: queries of layers without RoPE are scaled by their position. Inkling: likewise with full
  attention, and biases depend on distances.
* Decoders of encoder-decoder models (BART, Marian, ...), RoFormer: a table of positions.
* A model that takes no positions around a decoder that does (MOSS-Transcribe, Whisper).

The last four count padding, so that a position there is a column of the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modeling_patches.cache_name import cache_in
from modeling_patches.per_call import Changes, plain


def needs_positions(model: PreTrainedModel) -> bool:
    """Whether a model takes 4-D masks only with :func:`tree_positions`."""
    return _patch(model) is not None


def counts_padding(model: PreTrainedModel) -> bool:
    """Whether states of a token depend on the padding before it."""
    return _patch(model) in (_table, _inside, _roformer, _llama4, _inkling)


def tree_positions(model: PreTrainedModel, positions: Positions, changes: Changes) -> None:
    """Let forwards with a 4-D mask go by ``positions``, within ``changes``."""
    patch = _patch(model)
    assert patch is not None
    patch(_decoder(model), positions, changes)


_Patch = Callable[[Any, "Positions", Changes], None]


def _patch(model: PreTrainedModel) -> _Patch | None:
    text = model.config.get_text_config(decoder=True)
    if text.model_type == "falcon" and not text.alibi:
        return None
    if text.model_type == "llama4_text" and not text.attn_temperature_tuning:
        return None
    if not _takes_positions(model):
        decoder = _decoder(model)
        if _takes_positions(decoder):
            return _inside
        if _takes_positions(getattr(decoder, "embed_positions", None)):
            return _table
    return _PATCHES.get(text.model_type)


def _takes_positions(module: Any) -> bool:
    return isinstance(module, nn.Module) and (
        "position_ids" in inspect.signature(module.forward).parameters
    )


def _decoder(model: PreTrainedModel) -> Any:
    decoder = model.get_decoder()
    # BartDecoderWrapper and its like hold a decoder, Llama4ForCausalLM a model.
    return getattr(decoder, "decoder", getattr(decoder, "model", decoder))


class Positions:
    """The positions of the tokens and keys of the next forward."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, ...] = ()

    def set(
        self, query_positions: Tensor, key_positions: Tensor, padding: Tensor | int = 0
    ) -> None:
        """To be called before each forward whose mask is 4-D: additive ``(batch, 1, query, key)``,
        0 or negative, in the model's dtype.

        Args:
            query_positions: ``(batch, query)`` counted from each row's first token.
            key_positions: ``(batch, key)`` likewise; any where no query attends.
            padding: ``(batch, 1)`` columns before each row's first token.
        """
        self._last = query_positions, key_positions
        self.columns = query_positions + padding  # (batch, query)
        self.key_columns = key_positions + padding  # (batch, key)

    def of(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (batch, query) and (batch, key) for a forward with this 4-D mask.

        Keys that no query attends count as position 0, as padding does in Transformers: a stale
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


def _is_tree(mask: Any) -> TypeGuard[Tensor]:
    return isinstance(mask, Tensor) and mask.dim() == 4


# -- ALiBi ---------------------------------------------------------------------------------------


def _bloom(transformer: Any, positions: Positions, changes: Changes) -> None:
    stock = plain(transformer, "build_alibi_tensor")
    slopes = stock(_two_tokens(transformer), transformer.num_heads, torch.float32)[:, 0, 1]

    def build_alibi_tensor(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        if not _is_tree(attention_mask):
            return stock(attention_mask, num_heads, dtype)
        _, keys = positions.of(attention_mask)
        alibi = _per_head(slopes, keys).to(dtype)  # rounded last, as the original does
        return alibi.flatten(0, 1)  # (batch * heads, 1, key)

    changes.instead(transformer, "build_alibi_tensor", build_alibi_tensor)


def _falcon(transformer: Any, positions: Positions, changes: Changes) -> None:
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
        if not _is_tree(mask):
            return None
        _, keys = positions.of(mask)
        alibi = _per_head(slopes, keys).to(mask.dtype)  # (batch, heads, 1, key)
        tree["alibi"] = alibi
        tree["attention_mask"] = (alibi / scale).masked_fill(mask < 0, torch.finfo(mask.dtype).min)
        cache = cache_in(kwargs)
        length = mask.shape[-2] + (0 if cache is None else cache.get_seq_length())
        return args, kwargs | {"attention_mask": keys.new_ones(keys.shape[0], length)}

    changes.before(transformer, before_model)
    for block in transformer.h:
        changes.before(block, lambda args, kwargs: (args, kwargs | tree))


def _mpt(transformer: Any, positions: Positions, changes: Changes) -> None:
    stock = plain(transformer, "build_mpt_alibi_tensor")
    # MPT's ALiBi is 0 in the last slot, and minus the slope in the one before.
    slopes = -stock(transformer.num_heads, 2, device=transformer.device)[:, 0, 0]
    mask: Tensor | None = None  # that of the running forward

    def before_model(args: tuple, kwargs: dict) -> None:
        nonlocal mask
        mask = kwargs.get("attention_mask")

    def build_mpt_alibi_tensor(*args: Any, **kwargs: Any) -> Tensor:
        if not _is_tree(mask):
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
    """`MptAttention.forward` that also takes a 4-D bias, which differs between sequences."""
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
    """A 2-D mask of two tokens: the original ALiBi at the second is the slope."""
    return torch.ones(1, 2, dtype=torch.long, device=transformer.device)


def _per_head(slopes: Tensor, positions: Tensor) -> Tensor:
    """Bias (batch, heads, 1, key) from slopes (heads,) and positions (batch, key)."""
    return slopes.to(positions.device)[:, None, None] * positions[:, None, None, :]


# -- local attention -----------------------------------------------------------------------------


def _gpt_neo(decoder: Any, positions: Positions, changes: Changes) -> None:
    band: Tensor | None = None  # the local layers' mask, while a forward has a 4-D one

    def before_model(args: tuple, kwargs: dict) -> None:
        nonlocal band
        mask, band = kwargs.get("attention_mask"), None
        if _is_tree(mask):
            query, key = positions.of(mask)
            outside = query[:, :, None] - key[:, None, :] >= decoder.config.window_size
            band = mask.masked_fill(outside[:, None], torch.finfo(mask.dtype).min)

    def before_local_block(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs if band is None else kwargs | {"attention_mask": band}

    def without_triangle(attention: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        stock = plain(attention, "_attn")

        def _attn(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any) -> Any:
            if band is None:
                return stock(query, key, value, attention_mask)
            # The mask replaces the triangle over slots: one that hides nothing.
            size = key.shape[-2]
            triangle = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)
            own = SimpleNamespace(
                bias=triangle.expand(1, 1, size, size), attn_dropout=attention.attn_dropout
            )
            attention_mask = attention_mask.to(query.device)  # made where the first layer is
            return type(attention)._attn(own, query, key, value, attention_mask)

        return _attn

    changes.before(decoder, before_model)
    for block in decoder.h:
        attention = block.attn.attention
        if attention.attention_type == "local":
            changes.before(block, before_local_block)
        changes.instead(attention, "_attn", without_triangle(attention))


# -- columns of the batch ------------------------------------------------------------------------


#: Columns of the tokens, passed from layer to layer, so that what drops tokens drops theirs.
_COLUMNS = "tree_columns"


def _pass_columns(decoder: Any, positions: Positions, changes: Changes) -> None:
    def before_decoder(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {_COLUMNS: positions.columns}

    changes.before(decoder, before_decoder)


def _columns_in(attention: Any, changes: Changes) -> dict[str, Tensor]:
    """What parts of an attention module find while it runs: ``tree``, the columns ``(batch, n)``
    of its tokens, and ``stock``, those ``(n,)`` that the module itself takes them to have."""
    found: dict[str, Tensor] = {}

    def before(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        columns = kwargs[_COLUMNS]
        cache = cache_in(kwargs)
        start = 0 if cache is None else cache.get_seq_length(attention.layer_idx)
        stock = torch.arange(columns.shape[1], device=columns.device) + start
        found.update(tree=columns, stock=stock)
        return args, {key: value for key, value in kwargs.items() if key != _COLUMNS}

    changes.before(attention, before)
    return found


def _rescale(
    module: Any, found: dict[str, Tensor], scale: Callable[[Tensor], Tensor], changes: Changes
) -> None:
    """Divide a module's output ``(batch, n, ...)`` by the scale of the columns that attention will
    multiply it by, and multiply it by that of its tokens."""

    def after(args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        ratio = (scale(found["tree"]) / scale(found["stock"])).to(output.device)
        return (output * ratio.view(*ratio.shape, *[1] * (output.ndim - 2))).to(output.dtype)

    changes.after(module, after)


def _llama4(decoder: Any, positions: Positions, changes: Changes) -> None:
    """The temperature (https://huggingface.co/papers/2501.19399) of layers without RoPE."""
    config = decoder.config

    def scale(columns: Tensor) -> Tensor:
        steps = torch.floor((columns.float() + 1.0) / config.floor_scale)
        return torch.log1p(steps) * config.attn_scale + 1.0

    _pass_columns(decoder, positions, changes)
    for layer in decoder.layers:
        if not layer.self_attn.use_rope:
            found = _columns_in(layer.self_attn, changes)
            _rescale(layer.self_attn.q_proj, found, scale, changes)


def _inkling(decoder: Any, positions: Positions, changes: Changes) -> None:
    """Biases by relative positions, and the scale of full attention."""
    config = decoder.config

    def scale(columns: Tensor) -> Tensor:
        length = (columns + 1).float() / config.log_scaling_n_floor
        return 1.0 + config.log_scaling_alpha * torch.log(length.clamp(min=1.0))

    _pass_columns(decoder, positions, changes)
    for layer in decoder.layers:
        attention = layer.self_attn
        found = _columns_in(attention, changes)
        scaled = not attention.is_sliding and config.log_scaling_n_floor is not None
        if scaled:
            _rescale(attention.q_norm, found, scale, changes)
        bias = _relative_bias(
            attention.rel_logits_proj, found, positions, scale if scaled else None
        )
        changes.instead(attention.rel_logits_proj, "forward", bias)


def _relative_bias(
    module: Any, found: dict[str, Tensor], positions: Positions,
    scale: Callable[[Tensor], Tensor] | None,
) -> Callable[..., Tensor]:  # fmt: skip
    stock = plain(module, "forward")

    def forward(relative_states: Tensor, *args: Any) -> Tensor:
        device = relative_states.device
        queries, keys = found["tree"].to(device), positions.key_columns.to(device)
        rows = zip(relative_states.split(1), queries, keys)
        bias = torch.cat([stock(states, query, key) for states, query, key in rows])
        if scale is None:
            return bias
        ratio = (scale(found["tree"]) / scale(found["stock"])).to(device)
        return (bias * ratio[:, None, :, None]).to(bias.dtype)  # (batch, heads, query, key)

    return forward


def _roformer(decoder: Any, positions: Positions, changes: Changes) -> None:
    def before_attention(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        angles = kwargs["sinusoidal_pos"].flatten(0, 2)[:, None]  # (batch, 1, query, dim)
        return args, kwargs | {"sinusoidal_pos": angles}

    _table(decoder.encoder, positions, changes)
    for layer in decoder.encoder.layer:
        changes.before(layer.attention, before_attention)


def _table(decoder: Any, positions: Positions, changes: Changes) -> None:
    table = decoder.embed_positions
    stock = plain(table, "forward")

    def forward(given: Any, *args: Any, **kwargs: Any) -> Tensor:
        columns = positions.columns.to(table.weight.device)
        found: Tensor = stock(given, 0, position_ids=columns)
        return found.view(*columns.shape, -1)  # some add a dimension to position_ids

    changes.instead(table, "forward", forward)


def _inside(decoder: Any, positions: Positions, changes: Changes) -> None:
    def before_decoder(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"position_ids": positions.columns}

    changes.before(decoder, before_decoder)


_PATCHES: dict[str, _Patch] = {
    "bloom": _bloom, "falcon": _falcon, "mpt": _mpt, "gpt_neo": _gpt_neo, "llama4_text": _llama4,
    "inkling_text": _inkling, "roformer": _roformer,
}  # fmt: skip
