"""Tables made of a model's and an adapter's weights: once, and anew when these have changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

Made = TypeVar("Made")


def made_once(model: Any, name: str, weights: Sequence[Any], make: Callable[[], Made]) -> Made:
    """What ``make()`` gave for these weights; of another set of them the last one is kept.

    Args:
        model: whose weights are among them.
        name: of what is made.
        weights: what it is made of.
        make: makes it.
    """
    made_of = [one.data if is_plain(one) else one for one in weights]
    key = [
        (one.data_ptr(), whole._version) if is_plain(whole) else id(whole)
        for one, whole in zip(made_of, weights)
    ]
    of_model = _KNOWN.setdefault(model, {})
    known = of_model.get(name)
    if known is None or known[0] != key:
        # What the key names must not be freed, or its place could become another's.
        known = of_model[name] = (key, made_of, make())
    made: Made = known[2]
    return made


def is_plain(weight: Any) -> bool:
    """Whether its numbers are its own: neither quantised nor spread over devices."""
    return isinstance(weight, Tensor) and type(weight.data) is Tensor and not weight.is_meta


_KNOWN: WeakKeyDictionary[Any, dict[str, tuple[list[Any], list[Any], Any]]] = WeakKeyDictionary()
