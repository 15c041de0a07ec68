"""Positions of tokens where a model takes none, for forwards with a 4-D mask.

These architectures compute positions from a 2-D padding mask or from slots of the KV cache, which
siblings of a draft tree make wrong. Here the caller gives the position of every query and key, and
the mask determines which slots a query sees. Forwards without a 4-D mask are not changed.

* Bloom, Falcon with ALiBi, MPT: :mod:`.alibi`.
* GPT-Neo: a triangle over slots hides keys, and in local layers also those outside of a window.
* Llama 4: queries of layers without RoPE are scaled by their position. Inkling: likewise with full
  attention, and biases depend on distances.
* Decoders of encoder-decoder models (BART, Marian, ...), RoFormer: a table of positions.
* A model that takes no positions around a decoder that does (MOSS-Transcribe, Whisper).

The last four count padding, so that a position there is a column of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modeling_patches import alibi
from modeling_patches.cache_name import CACHE
from modeling_patches.given_positions import Positions, is_tree
from modeling_patches.modules import takes
from modeling_patches.per_call import Changes, plain


def needs_positions(model: PreTrainedModel) -> bool:
    """Whether a model takes 4-D masks only with :func:`tree_positions`."""
    return _patch(model) is not None


def counts_padding(model: PreTrainedModel) -> bool:
    """Whether states of a token depend on the padding before it."""
    return _patch(model) in (_table, _inside, _roformer, _llama4, _inkling)


def counts_columns(model: PreTrainedModel) -> bool:
    """Whether attention goes by distances in the batch's columns, padding between tokens
    included."""
    return _patch(model) in (alibi.mpt, _gpt_neo, _inkling)


def tree_positions(model: PreTrainedModel, positions: Positions, changes: Changes) -> None:
    """Let forwards with a 4-D mask go by ``positions``, within ``changes``."""
    patch = _patch(model)
    assert patch is not None
    patch(_decoder(model), positions, changes)


_Patch = Callable[[Any, Positions, Changes], None]


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
    return isinstance(module, nn.Module) and takes(module, "position_ids")


def _decoder(model: PreTrainedModel) -> Any:
    decoder = model.get_decoder()
    # BartDecoderWrapper and its like hold a decoder, Llama4ForCausalLM a model.
    return getattr(decoder, "decoder", getattr(decoder, "model", decoder))


# -- local attention -----------------------------------------------------------------------------


def _gpt_neo(decoder: Any, positions: Positions, changes: Changes) -> None:
    band: Tensor | None = None  # the local layers' mask, while a forward has a 4-D one

    def before_model(args: tuple, kwargs: dict) -> None:
        nonlocal band
        mask, band = kwargs.get("attention_mask"), None
        if is_tree(mask):
            query, key = positions.of(mask)
            outside = query[:, :, None] - key[:, None, :] >= decoder.config.window_size
            band = mask.masked_fill(outside[:, None], torch.finfo(mask.dtype).min)

    def before_local_block(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs if band is None else kwargs | {"attention_mask": band}

    def attend(attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Any:
        if band is None:
            return plain(attention, "_attn")(query, key, value, mask)
        # The mask replaces the triangle over slots: one that hides nothing.
        size = key.shape[-2]
        triangle = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)
        own = SimpleNamespace(
            bias=triangle.expand(1, 1, size, size), attn_dropout=attention.attn_dropout
        )
        mask = mask.to(query.device)  # made where the first layer is
        return type(attention)._attn(own, query, key, value, mask)

    changes.before(decoder, before_model)
    for block in decoder.h:
        attention = block.attn.attention
        if attention.attention_type == "local":
            changes.before(block, before_local_block)
        changes.instead(attention, "_attn", partial(attend, attention))


# -- columns of the batch ------------------------------------------------------------------------


#: Columns of the tokens, passed from layer to layer, so that what drops tokens drops theirs.
_COLUMNS = "tree_columns"


def _pass_columns(
    decoder: Any, positions: Positions, changes: Changes, name: str = _COLUMNS
) -> None:
    changes.before(decoder, lambda args, kwargs: (args, kwargs | {name: positions.columns}))


def _columns_in(attention: Any, changes: Changes) -> dict[str, Tensor]:
    """What parts of an attention module find while it runs: ``tree``, the columns ``(batch, n)``
    of its tokens, and ``stock``, those ``(n,)`` that the module itself takes them to have."""
    found: dict[str, Tensor] = {}

    def before(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        columns = kwargs[_COLUMNS]
        cache = kwargs.get(CACHE)
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


def inkling_scale(config: Any, lengths: Tensor) -> Tensor:
    """By what queries and biases of full attention are multiplied after so many tokens."""
    relative = lengths.float() / config.log_scaling_n_floor
    return 1.0 + config.log_scaling_alpha * torch.log(relative.clamp(min=1.0))


def _inkling(decoder: Any, positions: Positions, changes: Changes) -> None:
    """Biases by relative positions, and the scale of full attention."""
    config = decoder.config

    def scale(columns: Tensor) -> Tensor:
        return inkling_scale(config, columns + 1)

    _pass_columns(decoder, positions, changes)
    for layer in decoder.layers:
        attention = layer.self_attn
        found = _columns_in(attention, changes)
        scaled = not attention.is_sliding and config.log_scaling_n_floor is not None
        if scaled:
            _rescale(attention.q_norm, found, scale, changes)
        module = attention.rel_logits_proj
        bias = partial(_relative_bias, module, found, positions, scale if scaled else None)
        changes.instead(module, "forward", bias)


def _relative_bias(
    module: Any, found: dict[str, Tensor], positions: Positions,
    scale: Callable[[Tensor], Tensor] | None, relative_states: Tensor, *args: Any,
) -> Tensor:  # fmt: skip
    stock, device = plain(module, "forward"), relative_states.device
    queries, keys = found["tree"].to(device), positions.key_columns.to(device)
    rows = zip(relative_states.split(1), queries, keys)
    bias = torch.cat([stock(states, query, key) for states, query, key in rows])
    if scale is None:
        return bias
    ratio = (scale(found["tree"]) / scale(found["stock"])).to(device)
    return (bias * ratio[:, None, :, None]).to(bias.dtype)  # (batch, heads, query, key)


def _roformer(decoder: Any, positions: Positions, changes: Changes) -> None:
    def before_attention(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        angles = kwargs["sinusoidal_pos"].flatten(0, 2)[:, None]  # (batch, 1, query, dim)
        return args, kwargs | {"sinusoidal_pos": angles}

    _table(decoder.encoder, positions, changes)
    for layer in decoder.encoder.layer:
        changes.before(layer.attention, before_attention)


def _table(decoder: Any, positions: Positions, changes: Changes) -> None:
    table = decoder.embed_positions

    def forward(given: Any, *args: Any, **kwargs: Any) -> Tensor:
        columns = positions.columns.to(table.weight.device)
        found: Tensor = plain(table, "forward")(given, 0, position_ids=columns)
        return found.view(*columns.shape, -1)  # some add a dimension to position_ids

    changes.instead(table, "forward", forward)


def _inside(decoder: Any, positions: Positions, changes: Changes) -> None:
    _pass_columns(decoder, positions, changes, "position_ids")


_PATCHES: dict[str, _Patch] = {
    "bloom": alibi.bloom, "falcon": alibi.falcon, "mpt": alibi.mpt, "gpt_neo": _gpt_neo,
    "llama4_text": _llama4, "inkling_text": _inkling, "roformer": _roformer,
}  # fmt: skip
