"""Trees of tokens in a model's recurrent layers.

Such layers look up module-level functions (``causal_conv1d_fn``, ``torch_chunk_gated_delta_rule``
and others) at each call, in the module that defines their class. A permanent dispatcher takes the
place of each, which asks the running call (:mod:`.per_call`) what to run; other calls run what was
there before, be it code of Transformers, of a package such as ``fla`` or ``mamba_ssm``, or a kernel
from the Hub. Layers are found by the names that their code uses, so those of unknown models are
found, too. Those that update a state without these functions are refused by name.
"""

import functools
import inspect
import sys
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from hf_spec.modeling_patches import recurrences as rules
from hf_spec.modeling_patches.mamba import MAMBA1, MAMBA2
from hf_spec.modeling_patches.per_call import Changes, Replaceable
from hf_spec.modeling_patches.recurrences import Rule

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

    def run(self, rule: Rule, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The outputs of a rule of the running layer, whose further arguments are given, and the
        layer's state before the step."""


class Running:
    """The states of the running forward, to be set before it."""

    states: States


class RecurrentModule(NamedTuple):
    """A module that keeps states."""

    module: Any
    owner: ModuleType  # in which its class looks up functions of these names
    functions: frozenset[str]

    @property
    def rule(self) -> Rule:
        """What it computes, a convolution aside if there is more."""
        return RULES[next(iter(self.functions - {_CONV}), _CONV)]


def keeps_states(module: nn.Module) -> bool:
    """Whether a module keeps recurrent states in the cache."""
    kind: Any = type(module)
    return bool(_names(kind) & _UPDATES)


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


@functools.lru_cache(maxsize=1024)  # asked for every module in each call
def _names(kind: type) -> frozenset[str]:
    """The names that the code of a class's methods uses."""
    methods = (inspect.unwrap(one) for one in vars(kind).values() if inspect.isfunction(one))
    codes = (one.__code__ for one in methods if hasattr(one, "__code__"))
    return frozenset(name for code in codes for name in code.co_names)


def tree_recurrences(model: nn.Module, changes: Changes, running: Running) -> None:
    """Have the model's layers apply their rules to the tokens of the running step."""
    for module, owner, functions in recurrent_modules(model):
        own = vars(module).get("forward")
        if getattr(own, "__func__", None) is not None and not hasattr(own, "_hf_hook"):
            # A kernel from the Hub replaces the whole layer: run the class's forward.
            changes.instead(module, "forward", type(module).forward.__get__(module))
        for name in functions:
            function = getattr(owner, name)
            if not isinstance(function, Replaceable):
                setattr(owner, name, Replaceable(owner, name, function))
            changes.instead(owner, name, partial(_function, name, running))


def _function(name: str, running: Running, /, *args: Any, **kwargs: Any) -> Any:
    out, state = running.states.run(RULES[name], *args, **kwargs)
    # Caches ignore the state.
    asked = kwargs.get("return_final_states") or kwargs.get("return_last_state")
    return (out, state) if name in RETURNS_STATE or asked else out
