"""Positions of tokens where a model takes none, for forwards with a 4-D mask.

These architectures compute positions from a padding mask or from slots of the KV cache, which
siblings of a draft tree make wrong; others of this kind are refused (:func:`slots_as_positions`).
Here the caller gives the positions. Forwards without a 4-D mask are not changed.
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

#: Columns of the tokens, passed from layer to layer, so that what drops tokens drops theirs.
_COLUMNS = "tree_columns"


class Positions:
    """The positions of the tokens and keys of the next forward with a 4-D mask."""

    def set(self, queries: Tensor, keys: dict[str, Tensor], padding: Tensor | int = 0) -> None:
        """From each row's first token, ``(batch, query)``, and ``(batch, key)`` for each kind of
        layer (see :attr:`TreeAttention.locals`), any where no query attends; ``(batch, 1)`` columns
        of padding before that token."""
        self.keys, self._padding, self.columns = keys, padding, queries + padding

    def key_columns(self, kind: str) -> Tensor:
        """``(batch, key)`` of this kind of layer."""
        # There is one entry where all layers are alike.
        return self.keys.get(kind, next(iter(self.keys.values()))) + self._padding


def needs_positions(model: PreTrainedModel) -> bool:
    """Whether a model takes 4-D masks only with :func:`tree_positions`."""
    return _patch(model) is not None


def counts_padding(model: PreTrainedModel) -> bool:
    """Whether states of a token depend on the padding before it."""
    return _patch(model) in (_inside, _by_columns)


def counts_columns(model: PreTrainedModel) -> bool:
    """Whether attention goes by distances in columns, padding between tokens included."""
    return model.config.get_text_config(decoder=True).model_type == "inkling_text"


def slots_as_positions(model: PreTrainedModel) -> str | None:
    """What of a model counts slots of the cache, and is not replaced here; None for nothing."""
    text = model.config.get_text_config(decoder=True)
    if text.model_type == "falcon" and text.alibi:
        return "ALiBi"
    return "local attention" if text.model_type == "gpt_neo" else None


def tree_positions(model: PreTrainedModel, changes: Changes) -> Positions | None:
    """What forwards with a 4-D mask go by, within ``changes``; None where they need nothing."""
    patch, positions = _patch(model), Positions()
    if patch is not None:
        patch(decoder_of(model), positions, changes)
    return None if patch is None else positions


def _patch(model: PreTrainedModel) -> Callable[[Any, Positions, Changes], None] | None:
    text = model.config.get_text_config(decoder=True)
    if text.model_type == "llama4_text" and not text.attn_temperature_tuning:
        return None
    if not takes(model, "position_ids") and takes(decoder_of(model), "position_ids"):
        return _inside
    patches = {"bloom": _bloom, "llama4_text": _by_columns, "inkling_text": _by_columns}
    return patches.get(text.model_type)


def _bloom(transformer: Any, positions: Positions, changes: Changes) -> None:
    """ALiBi (https://huggingface.co/papers/2108.12409): slope[head] * key position."""
    stock = plain(transformer, "build_alibi_tensor")
    two_tokens = torch.ones(1, 2, dtype=torch.long, device=transformer.device)
    slopes = stock(two_tokens, transformer.num_heads, torch.float32)[:, 0, 1]

    def build_alibi_tensor(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        if mask.ndim != 4:
            return stock(mask, num_heads, dtype)
        # Keys that no query attends are at 0: a stale position times a slope can overflow fp16.
        keys = positions.keys[""].masked_fill((mask < 0).all(dim=-2)[:, 0], 0)
        alibi = slopes.to(keys.device)[:, None, None] * keys[:, None, None, :]
        return alibi.to(dtype).flatten(0, 1)  # (batch * heads, 1, key)

    changes.instead(transformer, "build_alibi_tensor", build_alibi_tensor)


def _inside(decoder: Any, positions: Positions, changes: Changes) -> None:
    """A decoder that takes positions, in a model that takes none: MOSS-Transcribe, Whisper."""
    changes.before(decoder, lambda args, given: (args, given | {"position_ids": positions.columns}))


def _by_columns(decoder: Any, positions: Positions, changes: Changes) -> None:
    """Llama 4: the temperature (https://huggingface.co/papers/2501.19399) of layers without RoPE.
    Inkling: the scale of full attention, and biases by distances in columns."""
    config, inkling = decoder.config, decoder.config.model_type == "inkling_text"

    def scale(columns: Tensor) -> Tensor:
        place = columns.float() + 1.0
        if not inkling:
            return torch.log1p(torch.floor(place / config.floor_scale)) * config.attn_scale + 1.0
        relative = (place / config.log_scaling_n_floor).clamp(min=1.0)
        return 1.0 + config.log_scaling_alpha * torch.log(relative)

    changes.before(decoder, lambda args, given: (args, given | {_COLUMNS: positions.columns}))
    for layer in decoder.layers:
        attention, names = layer.self_attn, tuple[str, ...]()
        if not inkling:
            names = () if attention.use_rope else ("q_proj",)
        elif not attention.is_sliding and config.log_scaling_n_floor is not None:
            names = "q_norm", "r_proj"  # biases are linear in the latter
        found = _rescaled(attention, changes, scale if names else torch.ones_like, names)
        if inkling:
            bias = attention.rel_logits_proj
            kind = "sliding_attention" if attention.is_sliding else "full_attention"
            changes.instead(bias, "forward", partial(_relative_bias, bias, found, positions, kind))


def _rescaled(
    attention: Any, changes: Changes, scale: Callable[[Tensor], Tensor], names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Divide outputs ``(batch, n, ...)`` of parts of an attention by the scale of the slots that
    it will multiply them by, and multiply them by that of its tokens' ``columns`` (batch, n), which
    are returned while it runs."""
    found: dict[str, Tensor] = {}

    def before(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        columns, cache = kwargs.pop(_COLUMNS), kwargs.get(CACHE)
        start = 0 if cache is None else cache.get_seq_length(attention.layer_idx)
        slots = torch.arange(columns.shape[1], device=columns.device) + start
        found.update(columns=columns, ratio=scale(columns) / scale(slots))
        return args, kwargs

    def after(args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        ratio = found["ratio"].to(output.device)
        return (output * ratio.view(*ratio.shape, *[1] * (output.ndim - 2))).to(output.dtype)

    changes.before(attention, before)
    for name in names:
        changes.after(getattr(attention, name), after)
    return found


def _relative_bias(
    module: Any, found: dict[str, Tensor], positions: Positions, kind: str, states: Tensor,
    *args: Any,
) -> Tensor:  # fmt: skip
    """The bias of each query for each key ``(batch, heads, query, key)``."""
    columns = found["columns"], positions.key_columns(kind)
    rows = zip(states.split(1), *(one.to(states.device) for one in columns))
    return torch.cat([plain(module, "forward")(*row) for row in rows])
