"""Trees of tokens in a model's recurrent layers.

Such layers look up module-level functions (``causal_conv1d_fn``, ``torch_chunk_gated_delta_rule``
and others) at each call, in the module that defines their class. A permanent dispatcher takes the
place of each, which asks the running call (:mod:`.per_call`) what to run; other calls run what was
there before, be it code of Transformers, of a package such as ``fla`` or ``mamba_ssm``, or a kernel
from the Hub. Layers are found by the names that their code uses, so those of unknown models are
found, too. Those that update a state without these functions have a forward of ours for trees
(:data:`INLINE`), or are refused by name.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling_patches import recurrences as rules
from modeling_patches.mamba import MAMBA1, MAMBA2
from modeling_patches.per_call import Changes, Replaceable, plain
from modeling_patches.recurrences import Rule

_CONV = "causal_conv1d_fn"
#: Functions that apply a rule to several tokens, by name.
RULES: dict[str, Rule] = {
    _CONV: rules.CONV,
    "torch_chunk_gated_delta_rule": rules.DELTA,
    "chunk_kimi_delta_attention": rules.KDA,
    "mamba2_chunk_scan": MAMBA2,
    "mamba_selective_scan": MAMBA1,
}
#: Those that return the state after their last token unasked.
RETURNS_STATE = frozenset({"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"})
#: Methods of a cache with which a layer changes its states.
_UPDATES = {"update_conv_state", "update_recurrent_state", "get_linear_cache"}


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
    """A forward for trees of a module that updates its states by code of its own; a step of one
    token runs the module's."""

    rule: Rule  # a convolution aside
    forward: Callable[..., Any]  # of the module, the states, and the module's own arguments
    pair: bool  # whether it returns something beside the hidden states


class RecurrentModule(NamedTuple):
    """A module that keeps states."""

    module: Any
    owner: ModuleType  # in which its class looks up functions of these names
    functions: frozenset[str]
    inline: Inline | None = None  # its forward for trees, if it uses none of them

    @property
    def rule(self) -> Rule:
        """What it computes, a convolution aside if there is more."""
        if self.inline is not None:
            return self.inline.rule
        return RULES[next(iter(self.functions - {_CONV}), _CONV)]


def keeps_states(module: nn.Module) -> bool:
    """Whether a module keeps recurrent states in the cache."""
    kind: Any = type(module)
    return bool(_names(kind) & _UPDATES)


def returns_pair(module: nn.Module) -> bool:
    """Whether attention, or a recurrence, returns something beside the hidden states."""
    inline = INLINE.get(type(module).__name__)
    return not keeps_states(module) if inline is None else inline.pair


def recurrent_modules(model: nn.Module) -> list[RecurrentModule]:
    """The modules of a model that keep states in its cache.

    Raises:
        ValueError: the forward of one of them updates a state by code of its own that is not known.
    """
    found = []
    for module in filter(keeps_states, model.modules()):
        kind: Any = type(module)
        names = _names(kind)
        forward = inspect.unwrap(kind.forward)
        owner = sys.modules[forward.__module__]
        inline = INLINE.get(kind.__name__)
        if inline is not None:
            found.append(RecurrentModule(module, owner, frozenset(), inline))
            continue
        functions = frozenset(names & set(RULES))
        convolves, recurs = _CONV in functions, bool(functions - {_CONV})
        # Every rule follows a convolution, whose update tells which layer runs.
        if not (convolves and recurs == ("update_recurrent_state" in names)):
            raise ValueError(
                f"{type(module).__name__} updates a recurrent state by code of its own, which is "
                "not written for trees"
            )
        found.append(RecurrentModule(module, owner, functions))
    return found


def recurrent_rules(model: nn.Module) -> dict[int, Rule]:
    """The rule of each layer with a state, its convolution aside.

    Raises:
        ValueError: see :func:`recurrent_modules`.
    """
    return {found.module.layer_idx: found.rule for found in recurrent_modules(model)}


def loses_state(model: nn.Module) -> bool:
    """Whether a recurrent state is lost where a forward of several tokens continues it."""
    # Of Mamba-1 in Transformers and in its kernels, several tokens start without a state.
    return MAMBA1 in recurrent_rules(model).values()


@functools.lru_cache(maxsize=1024)  # asked for every module in each call
def _names(kind: type) -> frozenset[str]:
    """The names that the code of a class's methods uses."""
    methods = (inspect.unwrap(one) for one in vars(kind).values() if inspect.isfunction(one))
    codes = (one.__code__ for one in methods if hasattr(one, "__code__"))
    return frozenset(name for code in codes for name in code.co_names)


def tree_recurrences(model: nn.Module, changes: Changes, running: Running) -> None:
    """Have the model's layers apply their rules to the tokens of the running step."""
    for module, owner, functions, inline in recurrent_modules(model):
        if inline is not None:
            changes.instead(module, "forward", partial(_forward, module, inline, running))
        own = vars(module).get("forward")
        if getattr(own, "__func__", None) is not None and not hasattr(own, "_hf_hook"):
            # A kernel from the Hub replaces the whole layer: run the class's forward.
            changes.instead(module, "forward", type(module).forward.__get__(module))
        for name in functions:
            function = getattr(owner, name)
            if not isinstance(function, Replaceable):
                setattr(owner, name, Replaceable(owner, name, function))
            changes.instead(owner, name, partial(_function, name, running))


def _forward(module: Any, inline: Inline, running: Running, /, *args: Any, **kwargs: Any) -> Any:
    states = running.states
    if states.plain:
        return plain(module, "forward")(*args, **kwargs)
    states.run_next(module.layer_idx)
    return inline.forward(module, states, *args, **kwargs)


def _function(name: str, running: Running, /, *args: Any, **kwargs: Any) -> Any:
    out, state = running.states.run(RULES[name], *args, **kwargs)
    # Caches ignore the state.
    asked = kwargs.get("return_final_states") or kwargs.get("return_last_state")
    return (out, state) if name in RETURNS_STATE or asked else out


# -- forwards of modules with code of their own ----------------------------------------------------


def minimax_attention(
    module: Any, states: States, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Lightning attention of MiniMax-Text-01 (MiniMax, 2025)."""
    batch, n, _ = hidden_states.shape
    qkv = module.act_fn(module.qkv_proj(hidden_states))
    qkv = qkv.view(batch, n, module.num_attention_heads, 3 * module.head_dim).transpose(1, 2)
    q, k, v = qkv.split(module.head_dim, dim=-1)
    out, state = states.run(rules.LIGHTNING, q, k, v, module.slope_rate)
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
    seen, _ = states.run(rules.WINDOWS, both, module.conv_kernel_size + 1)
    mixed = module.conv_qk_depthwise(seen.flatten(0, 1).transpose(1, 2))
    mixed = module.conv_qk_grouped(mixed).view(both.shape)
    query = query + mixed[..., : queries.shape[-1]].view(shape)
    key = key + mixed[..., queries.shape[-1] :].view(shape)

    delayed, _ = states.run(rules.DELAY, module.v_proj_delayed(hidden_states))
    value = torch.cat([module.v_proj_current(hidden_states), delayed], -1)
    return query, key, value.view(shape)


#: By the name of the module's class.
INLINE: dict[str, Inline] = {
    "MiniMaxLightningAttention": Inline(rules.LIGHTNING, minimax_attention, pair=True),
    "ZayaCCAProjection": Inline(rules.DELAY, zaya_projection, pair=False),
}
