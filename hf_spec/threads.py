"""What threads share: locks, the cores, and what is kept between calls for a model.

A process may fork at any time: a server's workers, a data loader's. A child has only the thread
that forked. A lock that another one held then would stay locked in the child for ever, and what it
guards may be half changed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, overload

T = TypeVar("T")
P = ParamSpec("P")


def new_lock(awaited: bool = False) -> Any:
    """A reentrant lock that no thread of a parent holds in a forked child. It is never freed: for
    modules, not for objects.

    It is Python's own, as an interrupt within a ``__enter__`` of ours would leave it locked.

    Args:
        awaited: whether forks wait until no other thread holds it, so that children find whole what
            it guards. For locks that are held briefly, while no other is taken.
    """
    lock: Any = threading.RLock()
    if not hasattr(os, "register_at_fork"):  # Windows, where nothing forks
        return lock
    if awaited:
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )
        return lock

    def renew() -> None:
        if lock.acquire(blocking=False):  # nobody's, or of the thread that forked
            lock.release()
        else:
            lock._at_fork_reinit()

    os.register_at_fork(after_in_child=renew)
    return lock


#: Held while code is launched that shares memory with all other code, until its results are copied,
#: also where a function is recorded, and where the default generator draws random numbers: PyTorch
#: 2.11 draws none, and replays no graph, in other threads while one captures.
RUNNING = new_lock()


class cached_property(Generic[T]):
    """``functools.cached_property`` without a lock: Python 3.11's has one for all instances, which
    threads would wait for. Two threads may compute the value; then one of both is kept."""

    def __init__(self, compute: Callable[[Any], T]):
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        # Not the other way around: others may have seen what is there.
        return vars(instance).setdefault(self._name, self._compute(instance))


# -- Cores -----------------------------------------------------------------------------------------


def end_team() -> None:
    """End the threads that OpenMP keeps for this one; its next product on a CPU starts others.

    GNU's, which PyTorch has on Linux, keeps a team for each thread that computes, as long as it
    lives. Where all teams have more threads than there are cores, they hardly wait for their next
    task, but sleep at once, and waking them takes longer than small operations do: on two cores,
    steps of a batch of 8 took 52 ms, and 62 to 71 ms beside one or more threads that had once
    computed something.
    """
    for pause in _pauses():
        pause(1)  # omp_pause_soft: what it has set stays


@functools.cache
def _pauses() -> list[Callable[[int], int]]:
    """``omp_pause_resource_all`` of each GNU OpenMP that is loaded."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
    found = [getattr(ctypes.CDLL(one), "omp_pause_resource_all", None) for one in sorted(files)]
    return [one for one in found if one is not None]


# -- What is kept between calls for a model --------------------------------------------------------
#
# It is the only such store, freed with the model. Calls in several threads share it: functions that
# read or change it are wrapped by :func:`locked`.

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
