"""State that calls keep for later calls of the same model; it is freed with the model.

Calls in several threads share it: functions that read or change it are wrapped by :func:`alone`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_lock = threading.RLock()
_left: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def alone(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: at most one thread at a time runs the function."""

    @functools.wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        with _lock:
            return function(*args, **kwargs)

    return waiting


@alone
def recall(model: Any, key: Hashable, make: Callable[[], T]) -> T:
    """What earlier calls have stored under this key; created if there is nothing."""
    left = _left.setdefault(model, {})
    if key not in left:
        left[key] = make()
    found: T = left[key]
    return found


@alone
def forget(model: Any) -> None:
    """Forget everything about a model, so that calls can be compared."""
    _left.pop(model, None)
