"""Wraps methods of other libraries where these have no hooks."""

import functools
from collections.abc import Callable
from typing import Any


def patch_method(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a method, of a class or inherited, by a function that gets the original one first.

    One that is wrapped already stays as it is, as modules may be loaded again.
    """
    owner = next(cls for cls in owner.__mro__ if name in vars(cls))
    found = vars(owner)[name]
    original = getattr(found, "__func__", found)

    def replace(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        if not hasattr(original, "_hf_spec"):
            method._hf_spec = True  # type: ignore[attr-defined]
            setattr(owner, name, method if original is found else classmethod(method))
        return function

    return replace
