"""How a model runs: its modules, hooks, adapters and attention, as found at a call.

A model's type promises what its forward does, but hooks, adapters and replaced functions may change
it. What is as Transformers and PEFT have made it is known; anything else must be tried.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_spec.modeling_patches.per_call import Replaceable, own_function
from hf_spec.modeling_patches.weights import placement, switches

#: Packages whose modules and wrappers treat all tokens alike, but for attention and recurrences,
#: which are known by the model's type.
_STOCK = (
    "torch.", "transformers.", "accelerate.", "bitsandbytes.", "peft.tuners.lora.",
    "peft.tuners.tuners_utils", "peft.utils.", "hf_spec.",
)  # fmt: skip
#: Packages whose hooks treat all tokens and rows alike.
_STOCK_HOOKS = ("torch.", "accelerate.", "deepspeed.")
#: Hooks of this package, and those by which Transformers collects `output_hidden_states`, which do
#: nothing otherwise.
_IDLE_HOOKS = ("hf_spec.", "transformers.utils.output_capturing")


class Fingerprint(NamedTuple):
    """How a model runs.

    Attributes:
        stock: whether all of it is as Transformers and PEFT have made it.
        hooks: names of the hooks on its modules that are not this package's.
        rows_stay: whether a hook may treat rows by their place in the batch.
        state: all of this and more; models of equal states run alike.
    """

    stock: bool
    hooks: frozenset[str]
    rows_stay: bool
    state: Hashable


def fingerprint(model: Any) -> Fingerprint:
    """How a model runs now."""
    text = model.config.get_text_config(decoder=True)
    attention = (
        _registered(text._attn_implementation), torch.nn.functional.scaled_dot_product_attention
    )  # fmt: skip
    modules: list[Any] = list(model.modules())
    kinds: list[Any] = [(type(module), type(module).forward) for module in modules]
    replaced = ((index, own_function(module, "forward")) for index, module in enumerate(modules))
    forwards = [(index, forward) for index, forward in replaced if forward is not None]
    hooks = _hooks(modules)
    origins = {origin(hook) for _, hook in hooks}
    device, dtype = placement(model)
    casts = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    rounds = torch.backends.cuda.matmul.fp32_precision == "tf32"
    kernels = rounds, torch.are_deterministic_algorithms_enabled()
    return Fingerprint(
        stock=all(map(_is_stock_attention, attention))
        and all(_is_stock_type(*kind) for kind in kinds)
        and all(_is_stock_wrapper(forward) for _, forward in forwards)
        # PEFT's choose an adapter for all tokens of a row.
        and all(origin.startswith((*_STOCK_HOOKS, "peft.")) for origin in origins),
        hooks=frozenset(getattr(hook, "__name__", type(hook).__name__) for _, hook in hooks),
        rows_stay=not all(origin.startswith(_STOCK_HOOKS) for origin in origins),
        state=(
            hash(tuple(kinds)),
            tuple((index, _identity(hook), _settings(hook)) for index, hook in hooks),
            tuple((index, _identity(forward)) for index, forward in forwards),
            switches(modules), text._attn_implementation, tuple(map(_identity, attention)),
            model.training, device.type, dtype, casts, kernels, torch.is_inference_mode_enabled(),
        ),
    )  # fmt: skip


def _hooks(modules: Sequence[Any]) -> list[tuple[int, Any]]:
    """The hooks that are not idle, each with the index of its module, -1 for all modules."""
    tables = [(-1, of_all_modules._global_forward_pre_hooks)]
    tables += [(-1, of_all_modules._global_forward_hooks)]
    for index, module in enumerate(modules):
        tables += [(index, module._forward_pre_hooks), (index, module._forward_hooks)]
    every = ((index, hook) for index, table in tables for hook in table.values())
    return [(index, hook) for index, hook in every if not origin(hook).startswith(_IDLE_HOOKS)]


def is_users_attention(name: str) -> bool:
    """Whether attention of this name is a function that a user has registered. Kernels of the Hub,
    whose names are those of repositories, compute what Transformers' functions do."""
    return "/" not in name and not _is_stock_attention(_registered(name))


def _registered(name: str) -> Any:
    function = None if "/" in name else ALL_ATTENTION_FUNCTIONS.get(name)
    return function.plain if isinstance(function, Replaceable) else function


def _is_stock_attention(function: Any) -> bool:
    return (
        function is None  # the model's own
        or function is torch._C._nn.scaled_dot_product_attention
        or origin(function).startswith(("transformers.", "hf_spec.modeling_patches."))
    )


@functools.cache
def _is_stock_type(kind: Hashable, forward: Hashable) -> bool:
    """Whether modules of a class, with this ``forward``, are from a package that is known."""
    return origin(kind).startswith(_STOCK) and _is_stock_wrapper(forward)


def _is_stock_wrapper(function: Any) -> bool:
    """Whether a function, and all that it wraps, are from packages that are known."""
    return all(origin(one).startswith(_STOCK) for one in _wrapped(function))


def _wrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        names = "_torchdynamo_orig_callable", "__wrapped__"
        inside = (getattr(function, name, None) for name in names)
        function = next(filter(None, inside), None)


def origin(function: Any) -> str:
    """The module in which the code of a class, function or callable object was written, whatever
    `functools.wraps` has copied; it ends with a dot."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, (type, BuiltinFunctionType)):
        where: Any = function.__module__
    else:
        code = getattr(function, "__globals__", None)
        where = type(function).__module__ if code is None else code.get("__name__")
    return f"{where}."


def _settings(thing: Any, depth: int = 3) -> Hashable:
    """Values by which a hook may be switched: flags, strengths, names and tensors that it holds, or
    that what it holds holds. Whole numbers may count calls, and are left out."""
    if isinstance(thing, torch.Tensor):
        return _identity(thing), None if thing.is_inference() else thing._version
    if thing is None or isinstance(thing, (bool, float, str)):
        return thing
    if not depth or isinstance(thing, (type, nn.Module)):
        return None
    held: list[Any] = []
    if isinstance(thing, functools.partial):
        held = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, MethodType):
        held = [thing.__self__, thing.__func__]
    elif isinstance(thing, FunctionType):
        cells = thing.__closure__ or ()
        held = [cell.cell_contents for cell in cells if cell != CellType()]
    elif isinstance(thing, dict):
        held = [*thing.values()]
    elif not origin(thing).startswith(("builtins.", "torch.")):
        held = [*getattr(thing, "__dict__", {}).values()]
    return tuple(_settings(one, depth - 1) for one in held)


class _Same(ref[Any]):
    """A key of an object, which it does not keep alive, that no later object gets."""

    def __init__(self, thing: Any):  # which `ref.__new__` has taken
        self._hash = id(thing)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        thing = self()
        return thing is not None and isinstance(other, _Same) and other() is thing


def _identity(thing: Any) -> Hashable:
    """A key of an object; for a bound method, of object and function."""
    if hasattr(thing, "__func__"):
        return _identity(thing.__self__), _identity(thing.__func__)
    try:
        return _Same(thing)
    except TypeError:  # it cannot be referenced weakly
        return id(thing)
