"""Wraps methods of other libraries where these have no hooks."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


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
