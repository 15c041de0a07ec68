"""What a step hands to the device: transfers, rows without padding, sizes that recur; what the
parts of a call have of each row, and which of their tensors recorded and compiled code takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor


def to_device(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.as_tensor(values, dtype, device)`` without making the host wait, unless it gets what
    a device has.

    A plain copy would wait for all work queued on the device.
    """
    # The memory is not pinned, so the host copies it before this returns.
    own = values if isinstance(values, Tensor) else torch.tensor(values, device="cpu", dtype=dtype)
    # What comes from a device would not be there yet.
    return own.to(device, dtype, non_blocking=own.device.type == "cpu")


def all_to_device(arrays: Sequence[Any], device: torch.device | str) -> list[Tensor]:
    """NumPy arrays as tensors, by one transfer; those of larger items must come first."""
    data = np.concatenate([one.reshape(-1).view(np.uint8) for one in arrays])
    whole, found, end = to_device(data, device), [], 0
    for one in arrays:
        start, end = end, end + one.nbytes
        kind = torch.from_numpy(one).dtype
        found.append(whole[start:end].view(kind).view(one.shape))
    return found


def is_async(device: torch.device) -> bool:
    """Whether a host that reads a tensor of this device waits for the work queued there."""
    return device.type != "cpu"


# -- Rows of different lengths without padding -----------------------------------------------------


class Ragged(NamedTuple):
    """The tokens of a padded batch without its padding, one row's after the other's, as one row.

    Attributes:
        real: ``(tokens,)`` int64, the place of each of them in the flattened batch.
        places: ``(batch, length)`` int64, which token is at each place of the batch; the first one
            stands at padding.
    """

    real: Tensor
    places: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], length: int, device: torch.device) -> Self:
        """That of rows with so many tokens each, padded behind them to ``length``."""
        real = np.arange(length) < np.array(lengths)[:, None]
        places = np.where(real, real.cumsum().reshape(real.shape) - 1, 0)
        return cls(*all_to_device([np.flatnonzero(real), places], device))

    @property
    def differs(self) -> bool:
        """Whether no tensor of these tokens can be taken for one of the padded batch, or be spread
        over it."""
        return 1 < len(self.real) != self.places.shape[1]

    def unpad(self, padded: Tensor) -> Tensor:
        """``(batch, length, ...)`` as ``(1, tokens, ...)``."""
        return padded.flatten(0, 1).index_select(0, self.real.to(padded.device))[None]

    def pad(self, tokens: Tensor) -> Tensor:
        """``(1, tokens, ...)`` as ``(batch, length, ...)``."""
        places = self.places.to(tokens.device)
        return tokens[0].index_select(0, places.flatten()).unflatten(0, places.shape)

    def at(self, tokens: Tensor, places: Tensor) -> Tensor:
        """``(batch, ...)`` of ``(1, tokens, ...)``, at one place ``(batch,)`` of each row."""
        rows = torch.arange(len(places), device=places.device)
        return tokens[0, self.places.to(places.device)[rows, places]]

    def pad_heads(self, tokens: Tensor) -> Tensor:
        """``(1, heads, tokens, dim)`` as ``(batch, heads, length, dim)``."""
        return self.pad(tokens.transpose(1, 2)).transpose(1, 2)


# -- Recurring sizes: code is compiled for each shape ----------------------------------------------


def bucket(count: int, parts: int = 1) -> int:
    """The smallest power of two that is at least ``count``; 0 for 0. With ``parts``, so many sizes
    lie between a power of two and the next, that one included."""
    if not count:
        return 0
    above = 1 << (count - 1).bit_length()
    step = max(above // (2 * parts), 1)
    return above if parts == 1 else -(-count // step) * step


# -- Parts of a call by names of attributes: which follow its rows, which code takes and gives -----


class FollowsRows:
    """A part of a call that has something of each row of the batch, and follows it.

    Attributes:
        of_rows: names of the attributes with it: tensors ``(batch, ...)``, lists with an entry for
            each row, other parts that follow the batch, tuples or dictionaries of all these, or
            None where there is nothing of any row.
        per_row: names of further ones, which code gives anew, see :class:`Holds`.
    """

    of_rows: ClassVar[Sequence[str]] = ()
    per_row: ClassVar[Sequence[str]] = ()

    def select(self, rows: Sequence[int]) -> None:
        """Follow the batch, whose row ``i`` is now the former ``rows[i]``, in any order. Behind a
        row there may be copies of it, which stand still: a batch may be padded."""
        select_rows(self, (*self.of_rows, *self.per_row), rows)

    def join(self, other: Self) -> None:
        """Take the rows of another call's part behind these. It must not be used again."""
        join_rows(self, (*self.of_rows, *self.per_row), other)


class Holds:
    """A part with tensors that are inputs of recorded and compiled code. Such code runs on a copy
    that holds others in their place, and so serves all steps.

    Attributes:
        held: names of the attributes with tensors in fixed memory, with other parts that hold some,
            with tuples or dictionaries of both, or None.
        per_row: names of those with tensors that differ from step to step, tuples of them, or None.
            The code gives them anew.
        taken: names of those that the code takes alone: tensors, anything else, by which code is
            told apart, or tuples and dictionaries of both.
    """

    held: ClassVar[Sequence[str]] = ()
    per_row: ClassVar[Sequence[str]] = ()
    taken: ClassVar[Sequence[str]] = ()

    @property
    def layout(self) -> Hashable:
        """What code depends on besides the shapes of the tensors."""
        return tuple(_layout(getattr(self, name)) for name in (*self.held, *self.taken))

    def tensors(self) -> list[Tensor]:
        """Those in fixed memory, always in the same order."""
        parts = ([one] if isinstance(one, Tensor) else one.tensors() for one in self._held())
        return [tensor for part in parts for tensor in part]

    def changing(self) -> list[Tensor]:
        """All others, in the same order."""
        parts = ([] if isinstance(one, Tensor) else one.changing() for one in self._held())
        own = _inside(self, (*self.per_row, *self.taken))
        return [*(tensor for part in parts for tensor in part), *own]

    def using(self, tensors: Iterator[Tensor], changing: Iterator[Tensor]) -> Self:
        """A copy that holds these in place of :meth:`tensors` and :meth:`changing`."""
        own = copy.copy(self)
        for name in self.held:
            setattr(own, name, _replaced(getattr(self, name), tensors, changing))
        own.take(changing)
        for name in self.taken:
            setattr(own, name, _replaced(getattr(self, name), changing, changing))
        return own

    def renewed(self) -> Sequence[Tensor]:
        """What code gives anew, of the copy that it runs on."""
        return [*_inside(self, self.per_row)]

    def take(self, tensors: Iterator[Tensor]) -> None:
        """Hold these in place of those that differ from step to step."""
        for name in self.per_row:
            setattr(self, name, _replaced(getattr(self, name), tensors, tensors))

    def _held(self) -> Iterator[Any]:
        return _inside(self, self.held)


def select_rows(owner: Any, names: Iterable[str], rows: Sequence[int]) -> None:
    """See :meth:`FollowsRows.select`; ``names`` of attributes of ``owner``."""
    for name in names:
        setattr(owner, name, selected(getattr(owner, name), rows))


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


def selected(value: Any, rows: Sequence[int]) -> Any:
    """A value of such an attribute for these rows; a part that follows the batch is changed."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value[to_device(rows, value.device)]
    if isinstance(value, list):
        return [value[row] for row in rows]
    if isinstance(value, (tuple, Mapping)):
        return _of_parts(lambda part: selected(part, rows), value)
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


def _inside(owner: Any, names: Iterable[str]) -> Iterator[Any]:
    """All tensors and parts in attributes of these names."""
    values = [getattr(owner, name) for name in names]
    while values:
        value = values.pop(0)
        if isinstance(value, (tuple, list, Mapping)):
            values[:0] = value.values() if isinstance(value, Mapping) else value
        elif isinstance(value, Tensor) or _is_part(value):
            yield value


def _is_part(value: Any) -> bool:
    return hasattr(value, "changing") and hasattr(value, "using")


def _layout(value: Any) -> Hashable:
    """What code depends on in the value of an attribute, besides the shapes of tensors."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Mapping):
        return tuple((name, _layout(part)) for name, part in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_layout(part) for part in value)
    return value.layout if _is_part(value) else repr(value)


def _replaced(value: Any, tensors: Iterator[Tensor], changing: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, (tuple, list, Mapping)):
        return _of_parts(lambda part: _replaced(part, tensors, changing), value)
    return value.using(tensors, changing) if _is_part(value) else value


def _of_parts(change: Callable[..., Any], value: Any, *others: Any) -> Any:
    """A tuple or dictionary of what becomes of the parts of one, or of several alike."""
    if isinstance(value, Mapping):
        return {name: change(*(one[name] for one in (value, *others))) for name in value}
    parts = [change(*each) for each in zip(value, *others, strict=True)]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
