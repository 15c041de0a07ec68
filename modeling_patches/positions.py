"""Positions of tokens where a model takes none, for forwards with a 4-D mask.

These architectures compute positions from a 2-D padding mask or from slots of the KV cache, which
siblings of a draft tree make wrong. Here the caller gives the position of every query and key, and
the mask determines which slots a query sees. Forwards without a 4-D mask are not changed.

* Bloom: ALiBi (https://huggingface.co/papers/2108.12409) adds ``slope[head] * key position``.
* Llama 4: queries of layers without RoPE are scaled by their position. Inkling: likewise with full
  attention, and biases depend on distances.
* A model that takes no positions around a decoder that does (MOSS-Transcribe, Whisper).

The last two count padding, so that a position there is a column of the batch. Others of this kind
are refused: see :func:`slots_as_positions`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from modeling_patches.cache_name import CACHE
from modeling_patches.modules import decoder_of, takes
from modeling_patches.per_call import Changes, plain


class Positions:
    """The positions of the tokens and keys of the next forward with a 4-D mask."""

    def set(self, queries: Tensor, keys: dict[str, Tensor], padding: Tensor | int = 0) -> None:
        """To be called before each such forward.

        Args:
            queries: ``(batch, query)`` positions counted from each row's first token.
            keys: ``(batch, key)`` likewise, for each kind of layer (see
                :attr:`TreeAttention.locals`); any where no query attends.
            padding: ``(batch, 1)`` columns before each row's first token.
        """
        self.keys, self._padding = keys, padding
        self.columns = queries + padding  # (batch, query)

    def key_columns(self, kind: str) -> Tensor:
        """``(batch, key)`` of this kind of layer."""
        # There is one entry where all layers are alike.
        return self.keys.get(kind, next(iter(self.keys.values()))) + self._padding


def needs_positions(model: PreTrainedModel) -> bool:
    """Whether a model takes 4-D masks only with :func:`tree_positions`."""
    return _patch(model) is not None


def counts_padding(model: PreTrainedModel) -> bool:
    """Whether states of a token depend on the padding before it."""
    return _patch(model) in (_inside, _llama4, _inkling)


def counts_columns(model: PreTrainedModel) -> bool:
    """Whether attention goes by distances in the batch's columns, padding between tokens
    included."""
    return _patch(model) is _inkling


def slots_as_positions(model: PreTrainedModel) -> str | None:
    """What of a model counts slots of the cache in a way that no patch here replaces; None if
    nothing does."""
    text = model.config.get_text_config(decoder=True)
    if text.model_type == "falcon" and text.alibi:
        return "ALiBi"
    return "local attention" if text.model_type == "gpt_neo" else None


def tree_positions(model: PreTrainedModel, changes: Changes) -> Positions | None:
    """What forwards with a 4-D mask go by, within ``changes``; None where they need nothing."""
    patch, positions = _patch(model), Positions()
    if patch is None:
        return None
    patch(decoder_of(model), positions, changes)
    return positions


_Patch = Callable[[Any, Positions, Changes], None]


def _patch(model: PreTrainedModel) -> _Patch | None:
    text = model.config.get_text_config(decoder=True)
    if text.model_type == "llama4_text" and not text.attn_temperature_tuning:
        return None
    if not takes(model, "position_ids") and takes(decoder_of(model), "position_ids"):
        return _inside
    return _PATCHES.get(text.model_type)


def _bloom(transformer: Any, positions: Positions, changes: Changes) -> None:
    stock = plain(transformer, "build_alibi_tensor")
    two_tokens = torch.ones(1, 2, dtype=torch.long, device=transformer.device)
    slopes = stock(two_tokens, transformer.num_heads, torch.float32)[:, 0, 1]

    def build_alibi_tensor(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        if mask.ndim != 4:
            return stock(mask, num_heads, dtype)
        # Keys that no query attends count as position 0, as padding does in Transformers: a stale
        # position times a slope can overflow fp16, and inf survives the addition of the mask.
        keys = positions.keys[""].masked_fill((mask < 0).all(dim=-2)[:, 0], 0)
        alibi = slopes.to(keys.device)[:, None, None] * keys[:, None, None, :]
        return alibi.to(dtype).flatten(0, 1)  # (batch * heads, 1, key)

    changes.instead(transformer, "build_alibi_tensor", build_alibi_tensor)


# -- columns of the batch ------------------------------------------------------------------------


#: Columns of the tokens, passed from layer to layer, so that what drops tokens drops theirs.
_COLUMNS = "tree_columns"


def _pass_columns(
    decoder: Any, positions: Positions, changes: Changes, name: str = _COLUMNS
) -> None:
    changes.before(decoder, lambda args, kwargs: (args, kwargs | {name: positions.columns}))


def _columns_in(
    attention: Any, changes: Changes, scale: Callable[[Tensor], Tensor] | None = None,
    scaled: tuple[str, ...] = (),
) -> dict[str, Tensor]:  # fmt: skip
    """What parts of an attention module find while it runs: ``columns`` ``(batch, n)`` of its
    tokens. The outputs ``(batch, n, ...)`` of parts that are ``scaled`` are divided by the scale of
    the slots that attention will multiply them by, and multiplied by that of their columns."""
    found: dict[str, Tensor] = {}

    def before(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        columns = found["columns"] = kwargs.pop(_COLUMNS)
        if scale is not None:
            cache = kwargs.get(CACHE)
            start = 0 if cache is None else cache.get_seq_length(attention.layer_idx)
            slots = torch.arange(columns.shape[1], device=columns.device) + start
            found["ratio"] = scale(columns) / scale(slots)
        return args, kwargs

    def rescaled(args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        ratio = found["ratio"].to(output.device)
        return (output * ratio.view(*ratio.shape, *[1] * (output.ndim - 2))).to(output.dtype)

    changes.before(attention, before)
    for name in scaled:
        changes.after(getattr(attention, name), rescaled)
    return found


def _llama4(decoder: Any, positions: Positions, changes: Changes) -> None:
    """The temperature (https://huggingface.co/papers/2501.19399) of layers without RoPE."""
    config = decoder.config

    def scale(columns: Tensor) -> Tensor:
        steps = torch.floor((columns.float() + 1.0) / config.floor_scale)
        return torch.log1p(steps) * config.attn_scale + 1.0

    _pass_columns(decoder, positions, changes)
    for layer in decoder.layers:
        if not layer.self_attn.use_rope:
            _columns_in(layer.self_attn, changes, scale, ("q_proj",))


def _inkling(decoder: Any, positions: Positions, changes: Changes) -> None:
    """Biases by relative positions, and the scale of full attention."""
    config = decoder.config

    def scale(columns: Tensor) -> Tensor:
        relative = (columns + 1).float() / config.log_scaling_n_floor
        return 1.0 + config.log_scaling_alpha * torch.log(relative.clamp(min=1.0))

    _pass_columns(decoder, positions, changes)
    for layer in decoder.layers:
        attention = layer.self_attn
        if attention.is_sliding or config.log_scaling_n_floor is None:
            found = _columns_in(attention, changes)
        else:  # biases are linear in what `r_proj` returns
            found = _columns_in(attention, changes, scale, ("q_norm", "r_proj"))
        bias = attention.rel_logits_proj
        kind = "sliding_attention" if attention.is_sliding else "full_attention"
        changes.instead(bias, "forward", partial(_relative_bias, bias, found, positions, kind))


def _relative_bias(
    module: Any, found: dict[str, Tensor], positions: Positions, kind: str, states: Tensor,
    *args: Any,
) -> Tensor:  # fmt: skip
    """The bias of each query for each key ``(batch, heads, query, key)``."""
    columns = found["columns"], positions.key_columns(kind)
    rows = zip(states.split(1), *(one.to(states.device) for one in columns))
    return torch.cat([plain(module, "forward")(*row) for row in rows])


def _inside(decoder: Any, positions: Positions, changes: Changes) -> None:
    _pass_columns(decoder, positions, changes, "position_ids")


_PATCHES: dict[str, _Patch] = {"bloom": _bloom, "llama4_text": _llama4, "inkling_text": _inkling}
