"""Tables made of a model's and an adapter's weights: once, and anew when these have changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Made = TypeVar("Made")


def made_once(owner: Tensor, others: Sequence[Any], make: Callable[[], Made]) -> Made:
    """What ``make()`` gave for these weights; kept as long as the owner is.

    Args:
        owner: a tensor of the adapter, of which one such table is made.
        others: what else it is made of: tensors, or None.
        make: makes it.
    """
    weights = [owner, *others]
    made_of = [one.data if is_plain(one) else one for one in weights]
    key = [
        (one.data_ptr(), whole._version) if is_plain(whole) else id(whole)
        for one, whole in zip(made_of, weights)
    ]
    known = _KNOWN.get(owner)
    if known is None or known[0] != key:
        # What the key names must not be freed, or its place could become another's.
        known = _KNOWN[owner] = (key, made_of, make())
    made: Made = known[2]
    return made


def is_plain(weight: Any) -> bool:
    """Whether its numbers are its own: neither quantised nor spread over devices."""
    return isinstance(weight, Tensor) and type(weight.data) is Tensor and not weight.is_meta


#: By the owner.
_KNOWN: Any = WeakTensorKeyDictionary()
