"""Modules whose forward updates recurrent states by code of its own, and their forwards for trees.

:mod:`.linear_attention` runs these instead; a step of one token runs the module's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling_patches.recurrences import DELAY, LIGHTNING, WINDOWS, Rule


class States(Protocol):
    """What holds the states of a forward."""

    @property
    def plain(self) -> bool:
        """Whether the running forward is one token per row, for which modules run their own code on
        copies of the states."""

    def run_next(self, layer: int) -> None:
        """The module that runs next is of this layer."""

    def run(self, rule: Rule, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The outputs of a rule of the running layer, whose further arguments are given, and the
        layer's state before the step."""


class Running:
    """The states of the running forward, to be set before it."""

    states: States


class Inline(NamedTuple):
    """A module's forward for trees.

    Attributes:
        rule: its rule, a convolution aside.
        forward: takes the module, the states, and the arguments of the module's forward.
        pair: whether it returns something beside the hidden states.
    """

    rule: Rule
    forward: Callable[..., Any]
    pair: bool


def minimax_attention(
    module: Any, states: States, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Lightning attention of MiniMax-Text-01 (MiniMax, 2025)."""
    batch, n, _ = hidden_states.shape
    qkv = module.act_fn(module.qkv_proj(hidden_states))
    qkv = qkv.view(batch, n, module.num_attention_heads, 3 * module.head_dim).transpose(1, 2)
    q, k, v = qkv.split(module.head_dim, dim=-1)
    out, state = states.run(LIGHTNING, q, k, v, module.slope_rate)
    out = module.norm(out.transpose(1, 2).reshape(batch, n, -1))
    return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * out), state


def zaya_projection(
    module: Any, states: States, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of compressed convolutional attention (arXiv 2510.04476): two
    convolutions over both of the former, and values of which one half is the previous token's."""
    shape = *hidden_states.shape[:2], -1, module.head_dim
    queries, keys = module.q_proj(hidden_states), module.k_proj(hidden_states)
    groups = module.num_key_value_groups
    query = (queries.view(shape) + keys.view(shape).repeat_interleave(groups, 2)) * 0.5
    key = query.view(*shape[:2], -1, groups, module.head_dim).mean(-2)

    both = torch.cat([queries, keys], -1)
    seen, _ = states.run(WINDOWS, both, module.conv_kernel_size + 1)
    mixed = module.conv_qk_depthwise(seen.flatten(0, 1).transpose(1, 2))
    mixed = module.conv_qk_grouped(mixed).view(both.shape)
    query = query + mixed[..., : queries.shape[-1]].view(shape)
    key = key + mixed[..., queries.shape[-1] :].view(shape)

    delayed, _ = states.run(DELAY, module.v_proj_delayed(hidden_states))
    value = torch.cat([module.v_proj_current(hidden_states), delayed], -1)
    return query, key, value.view(shape)


#: By the name of the module's class.
INLINE: dict[str, Inline] = {
    "MiniMaxLightningAttention": Inline(LIGHTNING, minimax_attention, pair=True),
    "ZayaCCAProjection": Inline(DELAY, zaya_projection, pair=False),
}
