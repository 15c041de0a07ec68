"""What is kept between calls for a model: the only such store, freed with the model.

Calls in several threads share it: functions that read or change it are wrapped by :func:`locked`.
"""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

from hf_spec.threads import new_lock

T = TypeVar("T")
P = ParamSpec("P")

#: Held while code is launched that shares memory with all other code, until its results are copied,
#: also where a function is recorded, and where the default generator draws random numbers: PyTorch
#: 2.11 draws none, and replays no graph, in other threads while one captures.
RUNNING = new_lock()
_LOCK = new_lock(awaited=True)
_MEMORIES: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
#: Key of what was learned from decoding.
_LEARNED = "learned"


def locked(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: at most one thread at a time runs the function."""

    @functools.wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        with _LOCK:
            return function(*args, **kwargs)

    return waiting


@locked
def memory(model: Any) -> dict[Hashable, Any]:
    """The values that are kept for a model, by name."""
    return _MEMORIES.setdefault(model, {})


@locked
def recall(model: Any, key: Hashable, make: Callable[[], T]) -> T:
    """What earlier calls have learned under this key; created if there is nothing."""
    learned = memory(model).setdefault(_LEARNED, {})
    if key not in learned:
        learned[key] = make()
    return learned[key]


@locked
def forget(model: Any) -> None:
    """Forget everything that was learned about a model, so that calls can be compared."""
    memory(model).pop(_LEARNED, None)


@locked
def exchange(model: Any, learned: dict[Hashable, Any]) -> dict[Hashable, Any]:
    """Go on with what was learned elsewhere; returns what was learned about a model so far."""
    known = memory(model)
    before: dict[Hashable, Any] = known.get(_LEARNED, {})
    known[_LEARNED] = learned
    return before
