"""What calls leave behind for later calls of the same model; it is forgotten with the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_left: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def recall(model: Any, key: Hashable, make: Callable[[], T]) -> T:
    """What earlier calls have left under this key; made now if there is nothing.

    Calls in several threads get the same object.
    """
    found: T = _left.setdefault(model, {}).setdefault(key, make())
    return found


def forget(model: Any) -> None:
    """Let the model's next call begin anew, so that calls can be compared."""
    _left.pop(model, None)
