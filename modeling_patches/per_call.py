"""Changes to a shared model that apply to one call only.

Hooks are not attached for a call and removed afterwards: other threads would run them, and an
interrupt would leave them behind. Instead, a module gets permanent *dispatchers*: a hook, or a
method of the instance, that asks the running call's :class:`Changes` what to do. The running call
is in a context variable. In all other calls, also in other threads, there is none, and dispatchers
do what the module does without them. They stay on the model when it is copied or pickled. Code that
``torch.compile`` traces skips them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any
from weakref import ref

import torch
from torch import nn

#: ``hook(args, kwargs)`` returns both, changed, or None to keep them.
Before = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
#: ``hook(args, kwargs, output)`` returns another output, or None to keep it.
After = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]

_installing = threading.Lock()


class Changes:
    """What the modules of a model do differently within :meth:`run`.

    One object serves all forwards of a call; additions take effect from the next forward on.
    """

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

    def instead(self, module: nn.Module, method: str, function: Callable[..., Any]) -> None:
        """Call ``function`` instead of a method of this module, such as ``forward``."""
        with _installing:
            own = vars(module).get(method)
            if not isinstance(own, _Method):
                setattr(module, method, _Method(module, method, own))
        self._instead[module, method] = function

    def replace_function(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let :func:`replaced` return ``function``, for functions that are not methods."""
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


def replaced(owner: Any, name: str) -> Callable[..., Any] | None:
    """The running call's replacement of a function; None if there is none."""
    if torch.compiler.is_compiling():
        return None
    for changes in reversed(_running.get()):
        function = changes._instead.get((owner, name))
        if function is not None:
            return function
    return None


def plain(module: nn.Module, method: str) -> Callable[..., Any]:
    """A method of a module without the changes of any call."""
    own = vars(module).get(method)
    if isinstance(own, _Method):
        return own.plain
    found: Callable[..., Any] = getattr(module, method)
    return found


def eager(model: nn.Module) -> Callable[..., Any]:
    """The model's forward that runs dispatchers, even after ``model.compile()``."""
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    return model._call_impl if compiled else model


def refuse_compiled(model: nn.Module, what: str) -> None:
    """Check that the modules inside a model run dispatchers.

    Args:
        model: the model.
        what: the feature that needs them, for the error.

    Raises:
        ValueError: some modules are compiled separately.
    """
    for name, module in model.named_modules():
        if name and getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{name} of this {type(model).__name__} is compiled, and compiled code leaves out "
                f"{what}: use the model without compiling its layers."
            )


def foreign_hooks(model: nn.Module) -> set[str]:
    """Names of the forward hooks on a model's modules that do not belong to this package."""
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
        module: the module, held by a weak reference.
        name: name of the method.
        own: the instance's replacement of its class's method, such as a hook of accelerate; None if
            there is none.
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
