"""Parts of a drafter whose tensors are inputs of compiled code, and not constants in it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor


class Holds:
    """Holds tensors in some of its attributes.

    Attributes:
        held: names of these attributes: tensors, tuples or dictionaries of them, other parts that
            hold some, or None.
    """

    held: ClassVar[Sequence[str]] = ()

    def tensors(self) -> list[Tensor]:
        """All tensors that it holds, always in the same order."""
        return [one for name in self.held for one in _inside(getattr(self, name))]

    def using(self, tensors: Iterable[Tensor]) -> Self:
        """A copy that holds these in place of :meth:`tensors`."""
        own, rest = copy.copy(self), iter(tensors)
        for name in self.held:
            setattr(own, name, _replaced(getattr(self, name), rest))
        return own


def _inside(value: Any) -> list[Tensor]:
    if value is None or isinstance(value, Tensor):
        return [] if value is None else [value]
    if isinstance(value, Holds):
        return value.tensors()
    parts = value.values() if isinstance(value, Mapping) else value
    return [one for part in parts for one in _inside(part)]


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    if value is None or isinstance(value, Tensor):
        return None if value is None else next(tensors)
    if isinstance(value, Holds):
        return value.using(tensors)
    if isinstance(value, Mapping):
        return {name: _replaced(part, tensors) for name, part in value.items()}
    parts = [_replaced(part, tensors) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
