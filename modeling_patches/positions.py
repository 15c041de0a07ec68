"""Positions of tokens where a model takes none, for forwards with a 4-D mask.

These architectures compute positions from a padding mask or from slots of the KV cache, which
siblings of a draft tree make wrong. Here the caller gives the positions. Forwards without a 4-D
mask are not changed.
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
    """The positions of the tokens and keys of the next forward with a 4-D mask.

    Attributes:
        columns: ``(batch, query)``, padding before a row's first token included.
        key_columns: ``(batch, key)`` of each kind of layer, see :attr:`TreeAttention.locals`.
    """

    def set(self, queries: Tensor, keys: dict[str, Tensor], padding: Tensor | int = 0) -> None:
        """From positions that begin at each row's first token, those of keys that no query attends
        to being any, and ``(batch, 1)`` columns of padding before it."""
        self.columns = queries + padding
        self.key_columns = {kind: at_keys + padding for kind, at_keys in keys.items()}


def needs_positions(model: PreTrainedModel) -> bool:
    """Whether a model takes 4-D masks only with :func:`tree_positions`; states of a token then
    depend on the padding before it, too."""
    return _patch(model) is not None


def counts_columns(model: PreTrainedModel) -> bool:
    """Whether attention goes by distances in columns, padding between tokens included."""
    return model.config.get_text_config(decoder=True).model_type == "inkling_text"


def tree_positions(model: PreTrainedModel, changes: Changes) -> Positions | None:
    """What forwards with a 4-D mask go by, within ``changes``; None where they need nothing."""
    patch = _patch(model)
    if patch is None:
        return None
    positions = Positions()
    patch(decoder_of(model), positions, changes)
    return positions


def _patch(model: PreTrainedModel) -> Callable[[Any, Positions, Changes], None] | None:
    text = model.config.get_text_config(decoder=True)
    if not takes(model, "position_ids") and takes(decoder_of(model), "position_ids"):
        return _inside
    scales = text.model_type == "llama4_text" and text.attn_temperature_tuning
    return _by_columns if scales or counts_columns(model) else None


def _inside(decoder: Any, positions: Positions, changes: Changes) -> None:
    """A decoder that takes positions, in a model that takes none: MOSS-Transcribe, Whisper."""
    changes.before(decoder, lambda args, given: (args, given | {"position_ids": positions.columns}))


def _by_columns(decoder: Any, positions: Positions, changes: Changes) -> None:
    """Llama 4: the temperature (https://huggingface.co/papers/2501.19399) of layers without RoPE.
    Inkling: the scale of full attention, and biases by distances in columns."""
    config = decoder.config

    def temperature(columns: Tensor) -> Tensor:
        floor = torch.floor((columns.float() + 1.0) / config.floor_scale)
        return torch.log1p(floor) * config.attn_scale + 1.0

    def log_scale(columns: Tensor) -> Tensor:
        relative = ((columns.float() + 1.0) / config.log_scaling_n_floor).clamp(min=1.0)
        return 1.0 + config.log_scaling_alpha * torch.log(relative)

    changes.before(decoder, lambda args, given: (args, given | {_COLUMNS: positions.columns}))
    for layer in decoder.layers:
        attention = layer.self_attn
        if config.model_type != "inkling_text":
            _rescale(attention, changes, temperature, () if attention.use_rope else ("q_proj",))
            continue
        scaled = not attention.is_sliding and config.log_scaling_n_floor is not None
        # Biases are linear in the output of the latter.
        columns = _rescale(attention, changes, log_scale, ("q_norm", "r_proj") if scaled else ())
        bias = attention.rel_logits_proj
        kind = "sliding_attention" if attention.is_sliding else "full_attention"
        changes.instead(bias, "forward", partial(_relative_bias, bias, columns, positions, kind))


def _rescale(
    attention: Any, changes: Changes, scale: Callable[[Tensor], Tensor], names: tuple[str, ...]
) -> list[Tensor]:
    """Divide outputs ``(batch, n, ...)`` of parts of an attention by the scale of the slots that
    it will multiply them by, and multiply them by that of its tokens' columns. Returns a list that
    holds these columns, ``(batch, n)``, while it runs."""
    columns, ratio = list[Tensor](), list[Tensor]()

    def before(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        columns[:], cache = [kwargs.pop(_COLUMNS)], kwargs.get(CACHE)
        if names:
            start = 0 if cache is None else cache.get_seq_length(attention.layer_idx)
            slots = torch.arange(columns[0].shape[1], device=columns[0].device) + start
            ratio[:] = [scale(columns[0]) / scale(slots)]
        return args, kwargs

    def after(args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        factor = ratio[0].view(*ratio[0].shape, *[1] * (output.ndim - 2))
        return (output * factor.to(output.device)).to(output.dtype)

    changes.before(attention, before)
    for name in names:
        changes.after(getattr(attention, name), after)
    return columns


def _relative_bias(
    module: Any, columns: list[Tensor], positions: Positions, kind: str, states: Tensor, *args: Any
) -> Tensor:
    """The bias of each query for each key ``(batch, heads, query, key)``."""
    keys = positions.key_columns
    both = (each.to(states.device) for each in (*columns, keys[kind if kind in keys else ""]))
    return torch.cat([plain(module, "forward")(*row) for row in zip(states.split(1), *both)])
