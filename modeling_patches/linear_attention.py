"""Trees of tokens in a model's recurrent layers.

Such layers look up module-level functions (``causal_conv1d_fn``, ``torch_chunk_gated_delta_rule``
and others) at each call, in the module that defines their class. A permanent dispatcher takes the
place of each, which asks the running call (:mod:`.per_call`) what to run; other calls run what was
there before, be it code of Transformers, of a package such as ``fla`` or ``mamba_ssm``, or a kernel
from the Hub. Layers are found by the names that their code uses, so those of unknown models are
found, too. Those that update a state without these functions have a forward of ours for trees
(:mod:`.inline_recurrences`), or are refused by name.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from modeling_patches import recurrences as rules
from modeling_patches.inline_recurrences import INLINE, Inline, Running
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
#: Those of them that take no state before their first token, in Transformers and in its kernels.
WITHOUT_STATE = frozenset({"mamba_selective_scan"})
#: Those that return the state after their last token unasked.
RETURNS_STATE = frozenset({"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"})
#: Methods of a cache with which a layer changes its states.
_UPDATES = {"update_conv_state", "update_recurrent_state", "get_linear_cache"}


class RecurrentModule(NamedTuple):
    """A module that keeps states.

    Attributes:
        module: the module.
        owner: the Python module in which its class looks functions up.
        functions: the names of the functions.
        inline: its forward for trees, if it uses none of them.
    """

    module: nn.Module
    owner: ModuleType
    functions: frozenset[str]
    inline: Inline | None = None


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
    found: dict[int, Rule] = {}
    for module, _, functions, inline in recurrent_modules(model):
        index: Any = module.layer_idx
        rule = RULES[next(iter(functions - {_CONV}), _CONV)]
        found[index] = rule if inline is None else inline.rule
    return found


def loses_state(model: nn.Module) -> bool:
    """Whether a recurrent state is lost where a forward of several tokens continues it."""
    return any(WITHOUT_STATE & found.functions for found in recurrent_modules(model))


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
            changes.instead(module, "forward", _forward(module, inline, running))
        own = vars(module).get("forward")
        if getattr(own, "__func__", None) is not None and not hasattr(own, "_hf_hook"):
            # A kernel from the Hub replaces the whole layer: run the class's forward.
            changes.instead(module, "forward", type(module).forward.__get__(module))
        for name in functions:
            function = getattr(owner, name)
            if not isinstance(function, Replaceable):
                setattr(owner, name, Replaceable(owner, name, function))
            changes.replace_function(owner, name, _function(name, running))


def _forward(module: Any, inline: Inline, running: Running) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        states = running.states
        if states.plain:
            return plain(module, "forward")(*args, **kwargs)
        states.run_next(module.layer_idx)
        return inline.forward(module, states, *args, **kwargs)

    return forward


def _function(name: str, running: Running) -> Callable[..., Any]:
    rule = RULES[name]

    def function(*args: Any, **kwargs: Any) -> Any:
        out, state = running.states.run(rule, *args, **kwargs)
        # Caches ignore the state.
        asked = kwargs.get("return_final_states") or kwargs.get("return_last_state")
        return (out, state) if name in RETURNS_STATE or asked else out

    return function
