"""What one call changes of a model that it shares with others.

Nothing is put on a model for a call and taken off again: another thread would meet it, an interrupt
would leave it there. Instead a module gets *dispatchers*, once: a hook, or a method of its own,
that asks the running call's :class:`Changes` what to do. Which call runs is a context variable, so
that for all other calls, in other threads too, there is none, and dispatchers do what the module
would have done without them. They stay on the model, and survive copying and pickling it; code that
``torch.compile`` traces goes without them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any
from weakref import ref

import torch
from torch import nn

#: ``hook(args, kwargs)`` -> both, changed; None leaves them as they are.
Before = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
#: ``hook(args, kwargs, output)`` -> another output; None leaves it as it is.
After = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]

_installing = threading.Lock()


class Changes:
    """What the modules of a model do otherwise while :meth:`run` runs.

    Made once per call and used for all of its forwards; what is added works from the next one on.
    """

    def __init__(self) -> None:
        self._before: dict[nn.Module, list[Before]] = {}
        self._after: dict[nn.Module, list[After]] = {}
        self._instead: dict[tuple[Any, str], Callable[..., Any]] = {}

    def before(self, module: nn.Module, hook: Before) -> None:
        """Call ``hook`` with a module's inputs, behind those that were added earlier."""
        with _installing:
            if _dispatch_before not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_dispatch_before, with_kwargs=True)
        self._before.setdefault(module, []).append(hook)

    def after(self, module: nn.Module, hook: After) -> None:
        """Call ``hook`` with a module's output, behind those that were added earlier."""
        with _installing:
            if _dispatch_after not in module._forward_hooks.values():
                module.register_forward_hook(_dispatch_after, with_kwargs=True)
        self._after.setdefault(module, []).append(hook)

    def instead(self, module: nn.Module, method: str, function: Callable[..., Any]) -> None:
        """Call ``function`` where a method of this module (``forward``, ...) would be called."""
        with _installing:
            own = vars(module).get(method)
            if not isinstance(own, _Method):
                setattr(module, method, _Method(module, method, own))
        self._instead[module, method] = function

    def replace_function(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let :func:`replaced` give ``function``, for functions that are no module's."""
        self._instead[owner, name] = function

    def update(self, other: Changes) -> Changes:
        """Add what ``other`` has, behind what is here already."""
        for module, before in other._before.items():
            self._before.setdefault(module, []).extend(before)
        for module, after in other._after.items():
            self._after.setdefault(module, []).extend(after)
        self._instead.update(other._instead)
        return self

    @torch.compiler.disable  # compiled code would leave the changes out
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` with these changes, and those that run already.

        In a context of its own, which ends with the call however that ends.
        """
        running = (*_running.get(), self)
        return copy_context().run(_run, running, function, args, kwargs)

    @torch.compiler.disable
    def run_alone(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`run`, but without the changes that run already."""
        return copy_context().run(_run, (self,), function, args, kwargs)


_running: ContextVar[tuple[Changes, ...]] = ContextVar("hf_spec_changes", default=())


def _run(running: tuple[Changes, ...], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _running.set(running)
    return function(*args, **kwargs)


def replaced(owner: Any, name: str) -> Callable[..., Any] | None:
    """What the running call has instead of a function; None where there is no such call."""
    if torch.compiler.is_compiling():
        return None
    for changes in reversed(_running.get()):
        function = changes._instead.get((owner, name))
        if function is not None:
            return function
    return None


def plain(module: nn.Module, method: str) -> Callable[..., Any]:
    """A method of a module as it is without any call's changes."""
    own = vars(module).get(method)
    if isinstance(own, _Method):
        return own.plain
    found: Callable[..., Any] = getattr(module, method)
    return found


def eager(model: nn.Module) -> Callable[..., Any]:
    """The model's forward that runs dispatchers, also where ``model.compile()`` was called."""
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    return model._call_impl if compiled else model


def refuse_compiled(model: nn.Module, what: str) -> None:
    """Raise unless the modules inside a model run dispatchers.

    Args:
        what: needs them, for the error.

    Raises:
        ValueError: some were compiled by themselves.
    """
    for name, module in model.named_modules():
        if name and getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{name} of this {type(model).__name__} is compiled, and compiled code leaves out "
                f"{what}: use the model without compiling its layers."
            )


def foreign_hooks(model: nn.Module) -> set[str]:
    """Names of the forward hooks on a model's modules that are not of this package."""
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ]
    package = __name__.partition(".")[0]
    return {
        getattr(hook, "__name__", type(hook).__name__)
        for hook in hooks
        if (getattr(hook, "__module__", None) or "").partition(".")[0] != package
    }


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


class _Method:
    """A module's method that runs the call's function instead, if there is one.

    Args:
        module: the module; weakly held, so that it is freed as soon as nobody needs it.
        own: what the instance had in place of its class's method, such as a hook of accelerate's.
    """

    def __init__(self, module: nn.Module, name: str, own: Callable[..., Any] | None):
        self._module = ref(module)
        self.name = name
        self.own = own

    def __reduce__(self) -> Any:
        return _Method, (self.module, self.name, self.own)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    @property
    def plain(self) -> Callable[..., Any]:
        if self.own is not None:
            return self.own
        method: Callable[..., Any] = getattr(type(self.module), self.name).__get__(self.module)
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (replaced(self.module, self.name) or self.plain)(*args, **kwargs)
