"""How a model runs: its modules, hooks, adapters and attention, as found at a call.

A model's type promises what its forward does, but hooks, adapters, replaced functions and numbers
that modules hold may change it. What is as Transformers and PEFT have made it is known; anything
else must be tried.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
from collections.abc import Hashable, Iterable, Iterator, Sequence
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_spec.modeling_patches.per_call import Replaceable, own_function
from hf_spec.modeling_patches.weights import placement

#: Packages whose modules and wrappers treat all tokens alike, but for attention and recurrences,
#: which are known by the model's type.
_STOCK = (
    "torch.", "transformers.", "accelerate.", "bitsandbytes.", "peft.tuners.lora.",
    "peft.tuners.tuners_utils", "peft.utils.", "hf_spec.",
)  # fmt: skip
#: Packages whose hooks treat all tokens and rows alike.
_STOCK_HOOKS = ("torch.", "transformers.", "accelerate.", "deepspeed.")
#: Hooks of this package, and those by which Transformers collects `output_hidden_states`, which do
#: nothing otherwise.
_IDLE_HOOKS = ("hf_spec.", "transformers.utils.output_capturing")
#: What a hook or module says of itself if that is so, whatever the tokens' number and places.
ALIKE = "treats_tokens_alike"
#: What the class of a module says of it if the model's forward does not run it.
BESIDE = "beside_model"

_PLAIN = frozenset({type(None), bool, int, float, str})
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)
#: What every module has, or may get from Transformers; parameters and hooks are read elsewhere.
_OF_EVERY_MODULE = {*vars(nn.Module()), "_output_capturing_hooks_installed"} - {"training"}
#: Of what a hook or a module holds, how deep and how much is read, of a container how much.
_DEPTH, _MOST, _FIRST = 3, 4096, 64
#: Numbers in a tensor that may be a switch.
_SMALL = 16


class State:
    """A key of how a model runs, which is hashed once."""

    def __init__(self, *parts: Hashable):
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, State) and self.parts == other.parts)


class Fingerprint(NamedTuple):
    """How a model runs.

    Attributes:
        stock: whether all of it is as Transformers and PEFT have made it.
        hooks: names of the hooks on its modules that are not this package's.
        apart: names of those that may tell the tokens of a forward apart.
        rows_stay: whether a hook may treat rows by their place in the batch.
        code: what runs: classes, functions, hooks, attention, dtypes, and what these say of
            themselves.
        held: what those that are not stock hold, and may be switched by, each with a name; without
            those that say that they treat tokens alike.
        state: all of this and more; models of equal states run alike.
    """

    stock: bool
    hooks: frozenset[str]
    apart: frozenset[str]
    rows_stay: bool
    code: State
    held: frozenset[tuple[str, Hashable]]
    state: State

    @property
    def tried(self) -> State:
        """What a trial is of."""
        return State(self.code, self.held)


def fingerprint(model: Any) -> Fingerprint:
    """How a model runs now."""
    text = model.config.get_text_config(decoder=True)
    attention = (
        _registered(text._attn_implementation), torch.nn.functional.scaled_dot_product_attention
    )  # fmt: skip
    modules = _modules(model)
    kinds: list[Any] = [(type(module), type(module).forward) for module in modules]
    hooks = _hooks(modules)
    read = _Reader(modules, model.config)
    known = [_is_stock_type(*kind) for kind in kinds]
    if not all(known):
        beside = _beside(modules)
        known = [one or id(module) in beside for one, module in zip(known, modules)]
    for index, module in enumerate(modules):
        read.module(index, module, known[index])
    for index, hook in hooks:
        if not origin(hook).startswith(_STOCK_HOOKS):
            read.hold(f"{index} {_name(hook)}", hook, hook)
    for function in attention:
        if not _is_stock_attention(function):
            read.hold(_name(function), function, function)
    origins = {origin(hook) for _, hook in hooks}
    device, dtype = placement(model)
    casts = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    rounds = torch.backends.cuda.matmul.fp32_precision == "tf32"
    kernels = rounds, torch.are_deterministic_algorithms_enabled()
    # PEFT's choose an adapter for all tokens of a row.
    foreign = [hook for _, hook in hooks if not origin(hook).startswith((*_STOCK_HOOKS, "peft."))]
    apart = frozenset(_name(hook) for hook in foreign if not _is_alike(hook))
    code = State(
        hash(tuple(kinds)), tuple((index, _identity(hook)) for index, hook in hooks),
        tuple(read.functions), text._attn_implementation, tuple(map(_identity, attention)),
        apart, tuple(name for name, _ in read.alike),
        model.training, device.type, dtype, casts, kernels, torch.is_inference_mode_enabled(),
    )  # fmt: skip
    held = frozenset(read.held)
    return Fingerprint(
        stock=read.stock
        and all(map(_is_stock_attention, attention))
        and all(known)
        and not foreign,
        hooks=frozenset(_name(hook) for _, hook in hooks),
        apart=apart,
        rows_stay=not all(one.startswith(_STOCK_HOOKS) for one in origins),
        code=code, held=held, state=State(code, held, tuple(read.alike), read.digest()),
    )  # fmt: skip


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _is_alike(thing: Any) -> bool:
    """Whether a hook or a module says that it treats all tokens alike."""
    while isinstance(thing, functools.partial) and not hasattr(thing, ALIKE):
        thing = thing.func
    holder = getattr(thing, "__self__", None)
    return getattr(thing, ALIKE, None) is True or getattr(holder, ALIKE, None) is True


class _Reader:
    """Reads what may change how modules compute.

    Attributes:
        stock: whether all functions that modules have of their own are known.
        functions: these functions, each with its module's index and its name.
        held: what hooks, and modules and functions that are not stock, hold, by name.
        alike: the same of those that say that they treat tokens alike.
    """

    def __init__(self, modules: Iterable[Any], config: Any):
        self.stock = True
        self.functions: list[Hashable] = []
        self.held: list[tuple[str, Hashable]] = []
        self.alike: list[tuple[str, Hashable]] = []
        self._modules = frozenset(map(id, modules))
        self._plain: list[Any] = []  # values of stock modules, and their names
        self._others: list[Hashable] = []  # those that cannot be written as bytes
        self._configs: set[int] = set()  # ids of those that were read
        self._kinds: set[type] = set()
        self._left = 0
        self._config(config)

    def digest(self) -> Hashable:
        """A key of what stock modules hold."""
        # As bytes: -1 and -2 hash alike, and NaN equals nothing. Later versions of the format also
        # write which values are the same object.
        written = marshal.dumps(self._plain, 2)
        return hashlib.blake2b(written, digest_size=16).digest(), tuple(self._others)

    def module(self, index: int, module: Any, stock: bool) -> None:
        """Read a module: of a stock one, values and functions; of another one, all that it
        holds."""
        plain, values = self._plain, vars(module)
        plain.append(index)
        for name in _own_names(tuple(values)):
            value = values[name]
            if type(value) in _PLAIN:
                plain += (name, value)
            elif name == "forward" or isinstance(value, _FUNCTIONS) or hasattr(value, "own"):
                self._function(index, module, name)
            else:
                self._other(f"{index} {name}", value)
        if not stock:
            self.hold(f"{index} {type(module).__name__}", module, module)

    def _function(self, index: int, module: Any, name: str) -> None:
        function = own_function(module, name)
        if function is not None:
            self.functions.append((index, name, _identity(function)))
            if not _is_stock_wrapper(function):
                self.stock = False
                self.hold(f"{index} {type(module).__name__}.{name}", function, module)

    def _config(self, config: Any) -> None:
        if id(config) in self._configs:
            return
        self._configs.add(id(config))
        for name, value in vars(config).items():
            if type(value) in _PLAIN:
                self._plain += (name, value)
            else:
                self._other(name, value)

    def _other(self, name: str, value: Any) -> None:
        """Read a value of a stock module or a config, other than a plain one."""
        if isinstance(value, PreTrainedConfig):
            self._config(value)
        elif isinstance(value, (torch.dtype, torch.device)):
            self._plain += (name, str(value))
        elif isinstance(value, Tensor):
            self._others.append((name, _version(value)))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            try:
                self._plain += (name, marshal.dumps(value, 2))
            except ValueError:
                self._left = _MOST
                self._others.append((name, self._of(value, 1)))

    def hold(self, name: str, thing: Any, whose: Any) -> None:
        """Read all that something holds which is not stock."""
        self._left = _MOST
        into = self.alike if _is_alike(whose) else self.held
        if not isinstance(thing, nn.Module):
            into.append((name, self._of(thing, _DEPTH)))
            return
        for attribute, value in _of_module(thing):
            into.append((f"{name}.{attribute}", self._of(value, _DEPTH - 1)))
        if (kind := type(thing)) not in self._kinds:
            self._kinds.add(kind)
            for attribute, value in _of_class(kind):
                into.append((f"class {kind.__name__}.{attribute}", self._of(value, _DEPTH - 1)))

    def _of(self, thing: Any, depth: int) -> Hashable:
        """Values of a thing, and of what it holds."""
        self._left -= 1
        kind = type(thing)
        if kind in _PLAIN:
            return thing, kind
        if isinstance(thing, Tensor):
            return _state_of(thing)
        if self._left < 0 or isinstance(thing, ModuleType):
            return None
        if isinstance(thing, (type, BuiltinFunctionType)):
            return _identity(thing)
        if not depth or (isinstance(thing, nn.Module) and id(thing) in self._modules):
            return None
        return tuple((name, self._of(value, depth - 1)) for name, value in self._inside(thing))

    def _inside(self, thing: Any) -> Iterable[tuple[Hashable, Any]]:
        """What something holds, by name."""
        if isinstance(thing, functools.partial):
            return enumerate([thing.func, *thing.args, *thing.keywords.values()])
        if isinstance(thing, MethodType):
            return enumerate([thing.__self__, thing.__func__])
        if isinstance(thing, FunctionType):
            return _of_function(thing)
        if isinstance(thing, (list, tuple)):
            return enumerate([len(thing), *thing[:_FIRST]])
        if isinstance(thing, dict):
            first = zip(range(_FIRST), thing.items())
            return [("", len(thing)), *((repr(name)[:99], value) for _, (name, value) in first)]
        if isinstance(thing, (set, frozenset)):
            return [("", frozenset(one for one in thing if type(one) in _PLAIN))]
        if isinstance(thing, nn.Module):
            return [*_of_module(thing), *_of_class(type(thing))]
        if isinstance(thing, PreTrainedConfig):
            return [*vars(thing).items()]
        if origin(thing).startswith(("builtins.", *_STOCK)):
            return ()
        return [*getattr(thing, "__dict__", {}).items(), *_of_class(type(thing))]


@functools.lru_cache(maxsize=1024)  # asked for every module in each call
def _own_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of a module's attributes, those that not every module has. Nor the length that rotary
    frequencies were made for, which each longer text moves."""
    return tuple(
        name for name in names
        if name not in _OF_EVERY_MODULE and not name.endswith("max_seq_len_cached")
    )  # fmt: skip


def _of_module(module: Any) -> list[tuple[str, Any]]:
    """What a module that is not stock holds; modules of the model are read by themselves."""
    own = [(name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    held = module._parameters, module._buffers, module._modules
    return [*own, *(item for table in held for item in table.items())]


def _of_class(kind: type) -> list[tuple[str, Any]]:
    """What a class has of its own, and those that it derives from, up to stock ones."""
    own = (one for one in kind.__mro__ if not origin(one).startswith(("builtins.", *_STOCK)))
    items = (item for one in own for item in vars(one).items())
    return [(name, value) for name, value in items if name == "__call__" or name[:2] != "__"]


def _of_function(function: FunctionType) -> list[tuple[Any, Any]]:
    """What a function that is not stock closes over, has as defaults and attributes, and finds by
    name in its module, other functions aside."""
    if origin(function).startswith(_STOCK):
        return []
    code, of_module = function.__code__, function.__globals__
    closed = zip(code.co_freevars, function.__closure__ or ())
    found = ((name, of_module[name]) for name in code.co_names if name in of_module)
    return [
        *((name, cell.cell_contents) for name, cell in closed if cell != CellType()),
        *zip(code.co_varnames, function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).items(), *vars(function).items(),
        *((name, one) for name, one in found if not isinstance(one, (*_FUNCTIONS, type))),
    ]  # fmt: skip


def _state_of(tensor: Tensor) -> Hashable:
    """A key of a tensor that may be a switch: the values of a few, and else when it was written to.
    Weights are none, and are moved where they are offloaded or shared."""
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return None
    if tensor.numel() <= _SMALL:
        return tuple(tensor.detach().flatten().tolist())
    return None if isinstance(tensor, nn.Parameter) else _version(tensor)


def _version(tensor: Tensor) -> Hashable:
    """A key of a tensor, which changes when it is written to."""
    return _identity(tensor), None if tensor.is_inference() else tensor._version


def _modules(model: Any) -> list[Any]:
    """All modules, each once. `modules()` makes names, too, which takes three times as long."""
    found, left = {}, [model]
    while left:
        module = left.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            left += module._modules.values()
    return [*found.values()]


def _beside(modules: Iterable[Any]) -> set[int]:
    """The ids of modules that the model's forward does not run, such as adapters that draft."""
    found = [module for module in modules if getattr(type(module), BESIDE, False)]
    return {id(part) for module in found for part in module.modules()}


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
