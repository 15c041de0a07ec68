"""What rows of a batch take with them when they leave it, or join those of another call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_spec.core.device import to_device


class FollowsRows:
    """A part of a call that has something of each row of the batch, and follows it.

    Attributes:
        of_rows: names of the attributes with it: tensors ``(batch, ...)``, lists with an entry for
            each row, other parts that follow the batch, tuples or dictionaries of all these, or
            None where there is nothing of any row.
    """

    of_rows: ClassVar[Sequence[str]] = ()

    def select(self, rows: Sequence[int]) -> None:
        """Follow the batch, whose row ``i`` is now the former ``rows[i]``, in any order. Behind a
        row there may be copies of it, which stand still: a batch may be padded."""
        select_rows(self, self.of_rows, rows)

    def join(self, other: Self) -> None:
        """Take the rows of another call's part behind these. It must not be used again."""
        join_rows(self, self.of_rows, other)


def select_rows(owner: Any, names: Iterable[str], rows: Sequence[int]) -> None:
    """See :meth:`FollowsRows.select`; ``names`` of attributes of ``owner``."""
    for name in names:
        setattr(owner, name, _selected(getattr(owner, name), rows))


def join_rows(owner: Any, names: Iterable[str], other: Any) -> None:
    """See :meth:`FollowsRows.join`; ``names`` of attributes of both.

    Raises:
        ValueError: there is something of the rows of one of both alone.
    """
    for name in names:
        what = f"{type(owner).__name__}.{name}"
        setattr(owner, name, _joined(getattr(owner, name), getattr(other, name), what))


def follows(part: Any) -> bool:
    """Whether rows of other calls can join a part: no class has defined how rows leave it without
    how they join it."""
    kinds = type(part).__mro__
    leave, join = ([name in vars(kind) for kind in kinds] for name in ("select", "join"))
    return any(join) and join.index(True) <= leave.index(True)


def _selected(value: Any, rows: Sequence[int]) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value[to_device(rows, value.device)]
    if isinstance(value, list):
        return [value[row] for row in rows]
    if isinstance(value, (tuple, Mapping)):
        return _of_parts(lambda part: _selected(part, rows), value)
    value.select(rows)
    return value


def _joined(own: Any, new: Any, what: str) -> Any:
    if (own is None) != (new is None):
        raise ValueError(
            f"{what} is {type(own).__name__} for the rows of one call, and {type(new).__name__} "
            "for those of another: define join(), which makes what is missing."
        )
    if own is None:
        return None
    if isinstance(own, Tensor):
        return torch.cat([own, new.to(own.device)])
    if isinstance(own, list):
        return own + new
    if isinstance(own, (tuple, Mapping)):
        return _of_parts(lambda one, other: _joined(one, other, what), own, new)
    own.join(new)
    return own


def _of_parts(change: Callable[..., Any], value: Any, *others: Any) -> Any:
    """A tuple or dictionary of what becomes of the parts of one, or of several alike."""
    if isinstance(value, Mapping):
        return {name: change(*(one[name] for one in (value, *others))) for name in value}
    parts = [change(*each) for each in zip(value, *others, strict=True)]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
