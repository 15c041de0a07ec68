"""Tensors in attributes: those of a drafter's parts, which are inputs of compiled code and not
constants in it, and what it keeps of each sequence."""

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
        return tensors_in(self, self.held)

    def using(self, tensors: Iterable[Tensor]) -> Self:
        """A copy that holds these in place of :meth:`tensors`."""
        own = copy.copy(self)
        replace_in(own, self.held, tensors)
        return own


def tensors_in(owner: Any, names: Sequence[str]) -> list[Tensor]:
    """All tensors in attributes of these names, see :attr:`Holds.held`, always in the same
    order."""
    return [one for name in names for one in _inside(getattr(owner, name))]


def replace_in(owner: Any, names: Sequence[str], tensors: Iterable[Tensor]) -> None:
    """Put the next tensors in place of :func:`tensors_in`."""
    rest = iter(tensors)
    for name in names:
        setattr(owner, name, _replaced(getattr(owner, name), rest))


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
