"""Inkling's layer for multi-token prediction: attention with biases by distance, and four short
convolutions, whose inputs are kept in slots of the KV cache.

A causal convolution of ``k`` taps reads a row's own input and those of the ``k - 1`` rows before
it. So no state is needed that would have to follow trees and what is accepted of them: the inputs
stand in the cache like keys, and a row's predecessors are those of the rows that it sees which are
1, 2, ... positions back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from modeling_patches.cache_name import CACHE
from modeling_patches.positions import inkling_scale

#: Slots ``(batch, n, taps - 1)`` of the rows before each row, oldest first, and whether they exist.
Taps = tuple[Tensor, Tensor]


class Convolved(nn.Module):
    """The parts of a decoder layer, run by the positions of rows and slots.

    ``index`` is that of the first of its :attr:`num_caches` sublayers in the cache.
    """

    #: Attention's keys and values; inputs of the convolutions over keys and over values; of that
    #: behind attention, in two halves; of that behind the MLP, likewise.
    num_caches = 4

    def __init__(self, layer: Any, index: int):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.attn_sconv, self.mlp_sconv = layer.attn_sconv, layer.mlp_sconv
        self.index = index

    def forward(
        self, hidden: Tensor, *, attention_mask: Tensor, position_ids: Tensor, seen: Tensor,
        key_positions: Tensor, **inputs: Any,
    ) -> Tensor:  # fmt: skip
        """``(batch, n, hidden)`` like its input.

        Args:
            attention_mask: ``(batch, 1, n, slots)`` bool, what attention sees.
            position_ids: ``(batch, n)``
            seen: as ``attention_mask``, without a window.
            key_positions: ``(batch or 1, slots)`` position of every slot.
            **inputs: the cache, and nothing else that is used.
        """
        cache = inputs.get(CACHE)
        distances = position_ids[:, :, None] - key_positions[:, None]
        taps = _taps(seen[:, 0], distances, self.attn_sconv.conv1d.weight.shape[-1])
        made = self.input_layernorm(hidden)
        made = self._attended(made, attention_mask, position_ids, distances, taps, cache)
        hidden = hidden + self._halves(made, self.attn_sconv, taps, cache, 2)
        made = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + self._halves(made, self.mlp_sconv, taps, cache, 3)

    def _attended(
        self, hidden: Tensor, mask: Tensor, positions: Tensor, distances: Tensor, taps: Taps,
        cache: Any,
    ) -> Tensor:  # fmt: skip
        own: Any = self.self_attn
        keys, values = self._convolved(
            (own.k_proj(hidden), own.v_proj(hidden)),
            (own.k_sconv.conv1d.weight, own.v_sconv.conv1d.weight), taps, cache, 1,
        )  # fmt: skip
        queries, keys, values = (
            one.unflatten(-1, (-1, own.head_dim)) for one in (own.q_proj(hidden), keys, values)
        )
        queries = own.q_norm(queries).transpose(1, 2)
        keys, values = own.k_norm(keys).transpose(1, 2), values.transpose(1, 2)
        keys, values = cache.update(keys, values, self.index)
        relative = own.r_proj(hidden).unflatten(-1, (own.num_heads, -1))
        bias = _bias(own.rel_logits_proj, relative, distances)
        if not own.is_sliding and own.config.log_scaling_n_floor is not None:
            # The length of the text up to a row's token, which is that of the next position.
            scale = inkling_scale(own.config, positions + 2)[:, None, :, None]
            queries, bias = ((one.float() * scale).to(one.dtype) for one in (queries, bias))
        out = scaled_dot_product_attention(
            queries, keys, values, bias.masked_fill(~mask, torch.finfo(bias.dtype).min),
            dropout_p=own.attention_dropout if self.training else 0.0, scale=own.scaling,
            enable_gqa=True,
        )  # fmt: skip
        found: Tensor = own.o_proj(out.transpose(1, 2).flatten(2))
        return found

    def _halves(self, inputs: Tensor, module: Any, taps: Taps, cache: Any, place: int) -> Tensor:
        """One convolution, whose inputs take the place of keys and of values."""
        weights = module.conv1d.weight.chunk(2)
        return torch.cat(self._convolved(inputs.chunk(2, -1), weights, taps, cache, place), -1)

    def _convolved(
        self, inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], taps: Taps, cache: Any,
        place: int,
    ) -> list[Tensor]:  # fmt: skip
        """Two convolutions of ``(batch, n, width)`` by weights ``(width, 1, taps)``, oldest first,
        plus their inputs, which the cache's sublayer ``place`` keeps."""
        kept = cache.update(*(one[:, None] for one in inputs), self.index + place)
        slots, known = taps
        found = []
        for own, states, weight in zip(inputs, kept, weights):
            weight = weight[:, 0].float()
            index = slots.flatten(1)[..., None].expand(-1, -1, own.shape[-1])
            before = states[:, 0].gather(1, index).unflatten(1, slots.shape[1:])
            before = before.float().masked_fill(~known[..., None], 0.0)
            total = own.float() * (1.0 + weight[:, -1])
            total = total + torch.einsum("bnkd,dk->bnd", before, weight[:, :-1])
            found.append(total.to(own.dtype))
        return found


def _taps(seen: Tensor, distances: Tensor, width: int) -> Taps:
    """Where the inputs of a convolution with ``width`` taps are, by ``(batch, n, slots)`` which
    slots rows see, and how far behind a row's position theirs are."""
    steps = [seen & (distances == step) for step in range(width - 1, 0, -1)]
    found = torch.stack(steps, 2)  # (batch, n, taps - 1, slots), one slot at the most
    return found.byte().argmax(-1), found.any(-1)


def _bias(module: Any, relative: Tensor, distances: Tensor) -> Tensor:
    """``(batch, heads, n, slots)`` what attention adds to its scores: 0 from ``rel_extent`` on;
    ``relative`` (batch, n, heads, d_rel) is how rows mix the module's profiles."""
    by_distance = (relative @ module.proj).transpose(1, 2)
    distances = distances[:, None]
    index = distances.clamp(0, module.rel_extent - 1).expand(-1, by_distance.shape[1], -1, -1)
    outside = (distances < 0) | (distances >= module.rel_extent)
    return by_distance.gather(-1, index).masked_fill(outside, 0.0)
