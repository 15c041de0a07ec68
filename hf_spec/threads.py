"""What threads share, so that a process may fork at any time: a server's workers, a data loader's.

A child has only the thread that forked. A lock that another one held then would stay locked in the
child for ever, and what it guards may be half changed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


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
