"""Changes of a call for a block of a test, where the product runs them for one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from modeling_patches import per_call
from modeling_patches.per_call import Changes


def fingerprint(model: Any) -> Any:
    """Every attribute and hook of every module, by identity, and the model's config."""
    modules = {
        name: (
            {key: id(value) for key, value in vars(module).items()},
            list(module._forward_pre_hooks.items()),
            list(module._forward_hooks.items()),
        )
        for name, module in model.named_modules()
    }
    return modules, model.config.to_dict(), model.config._attn_implementation


@contextmanager
def running(changes: Changes) -> Iterator[None]:
    token = per_call._running.set((*per_call._running.get(), changes))
    try:
        yield
    finally:
        per_call._running.reset(token)


@contextmanager
def added(add: Callable[..., Any], model: Any, *args: Any) -> Iterator[Any]:
    """Forwards of the block with what ``add(model, changes, *args)`` adds; gives its result."""
    changes = Changes()
    result = add(model, changes, *args)
    with running(changes):
        yield result
