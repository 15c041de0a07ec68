"""Changes to a model for one call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import nn

from hf_spec.threads import new_lock

# -- Changes to a shared model that apply to one call only -----------------------------------------
#
# Hooks are not attached for a call and removed afterwards: other threads would run them, and an
# interrupt would leave them behind. Instead, a module gets permanent *dispatchers*: a hook, or a
# method of the instance, that asks the running call's :class:`Changes` what to do. The running call
# is in a context variable. In all other calls, also in other threads, there is none, and
# dispatchers do what the module does without them. They stay on the model when it is copied or
# pickled. Code that ``torch.compile`` traces skips them, so in calls with changes a model's
# compiled parts run uncompiled (:func:`step_aside`).

#: ``hook(args, kwargs)`` returns both, changed, or None to keep them.
Before = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
#: ``hook(args, kwargs, output)`` returns another output, or None to keep it.
After = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]

logger = logging.getLogger(__name__)

_installing = new_lock(awaited=True)


class Changes:
    """What modules do differently within :meth:`run`; additions count from the next forward on."""

    def __init__(self) -> None:
        self._before: dict[nn.Module, list[Before]] = {}
        self._after: dict[nn.Module, list[After]] = {}
        self._instead: dict[tuple[Any, str], Callable[..., Any]] = {}

    def before(self, module: nn.Module, hook: Before) -> None:
        """Call ``hook`` with a module's inputs, after the hooks that were added earlier."""
        with _installing:
            if _dispatch_before not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_dispatch_before, with_kwargs=True)
        self._before.setdefault(module, []).append(hook)

    def after(self, module: nn.Module, hook: After) -> None:
        """Call ``hook`` with a module's output, after the hooks that were added earlier."""
        with _installing:
            if _dispatch_after not in module._forward_hooks.values():
                module.register_forward_hook(_dispatch_after, with_kwargs=True)
        self._after.setdefault(module, []).append(hook)

    def instead(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Call ``function`` instead of a module's method, ``forward`` or ``_call_impl`` with all
        its hooks, or instead of a :class:`Replaceable` function."""
        if isinstance(owner, nn.Module):
            with _installing:
                _dispatcher(owner, name)
        self._instead[owner, name] = function

    def update(self, other: Changes) -> Changes:
        """Add the changes of ``other`` after these; returns self."""
        for module, before in other._before.items():
            self._before.setdefault(module, []).extend(before)
        for module, after in other._after.items():
            self._after.setdefault(module, []).extend(after)
        self._instead.update(other._instead)
        return self

    @torch.compiler.disable  # compiled code would skip the changes
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function with these changes in addition to those already running.

        The call has a context of its own, so the changes end with it, also after an error.
        """
        running = (*_running.get(), self)
        return copy_context().run(_run, running, function, args, kwargs)

    @torch.compiler.disable
    def run_alone(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Like :meth:`run`, but without the changes already running."""
        return copy_context().run(_run, (self,), function, args, kwargs)


_running: ContextVar[tuple[Changes, ...]] = ContextVar("hf_spec_changes", default=())


def _run(running: tuple[Changes, ...], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _running.set(running)
    return function(*args, **kwargs)


def changing() -> bool:
    """Whether changes are running."""
    return bool(_running.get())


def replaced(owner: Any, name: str) -> Callable[..., Any] | None:
    """The running call's replacement of a function; None if there is none."""
    if torch.compiler.is_compiling():
        return None
    for changes in reversed(_running.get()):
        function = changes._instead.get((owner, name))
        if function is not None:
            return function
    return None


class Replaceable:
    """A function, other than a method, that runs the call's own one instead, if there is one."""

    def __init__(self, owner: Any, name: str, plain: Callable[..., Any]):
        self.owner, self.name, self.plain = owner, name, plain
        self.__name__, self.__wrapped__ = name, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (replaced(self.owner, self.name) or self.plain)(*args, **kwargs)


def plain(module: nn.Module, method: str) -> Callable[..., Any]:
    """A method of a module without the changes of any call."""
    found: Callable[..., Any] = getattr(module, method)
    return found.plain if isinstance(found, _Method) else found


def step_aside(model: nn.Module) -> None:
    """Let the model's compiled parts run as they were before, in calls with changes.

    To be called before a call with changes to any module of the model. Parts are compiled by
    ``torch.compile`` of a module, its ``forward`` or the model, or by ``module.compile()``. This
    warns of what was compiled since the last time.

    Raises:
        ValueError: a module's ``forward`` is compiled inside a wrapper of other code.
    """
    found = []
    with _installing:
        for name, module in model.named_modules():
            call = partial(_eager_call, module)
            for attribute, eager in (("forward", None), ("_compiled_call_impl", call)):
                code = vars(module).get(attribute)
                if isinstance(code, _Method):
                    code = code.own if code.eager is None else None
                inner = _uncompiled(code)
                if inner is None:
                    continue
                if inner is code:
                    raise ValueError(
                        f"{name or 'forward'} of this {type(model).__name__} is compiled and then "
                        "wrapped, and compiled code leaves out what strategies change: compile it "
                        "after wrapping (accelerate's prepare(), for example), or not at all."
                    )
                _dispatcher(module, attribute).eager = eager or inner
                found.append(name or "it")
    if found:
        more = f" and {len(found) - 3} more" * (len(found) > 3)
        logger.warning(
            "%s: %s%s is compiled by torch.compile; forwards of strategies run it uncompiled. For "
            "compiled steps, give cache_implementation='static' instead.",
            type(model).__name__, ", ".join(found[:3]), more,
        )  # fmt: skip


def _eager_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # which may be a dispatcher by then


def _uncompiled(function: Any) -> Callable[..., Any] | None:
    """What a function was compiled from; itself if it wraps compiled code; else None."""
    wrapped = function
    while wrapped is not None:
        if getattr(wrapped, "_torchdynamo_orig_callable", None) is not None:
            # functools.wraps copies attributes to wrappers, this one's mark is then another's.
            inner: Callable[..., Any] = torch._dynamo.eval_frame.innermost_fn(wrapped)
            if inner is not wrapped:
                return inner if wrapped is function else function
        wrapped = getattr(wrapped, "__func__", None) or getattr(wrapped, "__wrapped__", None)
    return None


def own_function(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """What an instance has in the place of its class's method, without this package's changes."""
    found = vars(module).get(name)
    return found.own if isinstance(found, _Method) else found


def _dispatch_before(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
    if torch.compiler.is_compiling():
        return None
    changed = False
    for changes in _running.get():
        for hook in changes._before.get(module, ()):
            result = hook(args, kwargs)
            if result is not None:
                (args, kwargs), changed = result, True
    return (args, kwargs) if changed else None


def _dispatch_after(module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> Any:
    if torch.compiler.is_compiling():
        return None
    changed = None
    for changes in _running.get():
        for hook in changes._after.get(module, ()):
            result = hook(args, kwargs, output)
            if result is not None:
                output = changed = result
    return changed


def _dispatcher(module: nn.Module, name: str) -> _Method:
    method = vars(module).get(name)
    if not isinstance(method, _Method):
        method = _Method(module, name, method)
        setattr(module, name, method)
    return method


class _Method:
    """A module's method that runs the call's function instead, if there is one."""

    def __init__(
        self, module: nn.Module, name: str, own: Callable[..., Any] | None,
        eager: Callable[..., Any] | None = None,
    ):  # fmt: skip
        self._module, self.name = ref(module), name
        self.own = own  # the instance's replacement of its class's method: accelerate's hooks, say
        self.eager = eager  # what `own` was compiled from, which runs in calls with changes

    def __reduce__(self) -> Any:
        return _Method, (self.module, self.name, self.own, self.eager)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    @property
    def plain(self) -> Callable[..., Any]:
        if self.eager is not None and not torch.compiler.is_compiling() and _running.get():
            return self.eager
        if self.own is not None:
            return self.own
        function = getattr(type(self.module), self.name)
        if torch.compiler.is_compiling():  # PyTorch 2.11 does not trace `__get__`
            return partial(function, self.module)
        return function.__get__(self.module)

    #: For `inspect.signature`, which tells what a forward takes.
    __wrapped__ = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = vars(self.module).get(self.name)
        if isinstance(outer, _Method) and outer is not self:  # somebody has wrapped this one since
            return self.plain(*args, **kwargs)
        return (replaced(self.module, self.name) or self.plain)(*args, **kwargs)


# -- Wraps methods of other libraries where these have no hooks ------------------------------------


def patch_method(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a method, of a class or inherited, by a function that gets the original one first.

    If it is wrapped already, as modules may be loaded again, the newest function takes the place of
    the former, also where others have wrapped the method since.
    """
    owner = next(cls for cls in owner.__mro__ if name in vars(cls))
    found = vars(owner)[name]
    original = getattr(found, "__func__", found)

    def replace(function: Callable[..., Any]) -> Callable[..., Any]:
        known = getattr(original, "_hf_spec", None)
        if known is not None:
            known.function = function
            return function
        own = SimpleNamespace(function=function)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return own.function(original, *args, **kwargs)

        method._hf_spec = own  # type: ignore[attr-defined]
        setattr(owner, name, method if original is found else classmethod(method))
        return function

    return replace
