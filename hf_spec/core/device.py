"""Sizes and transfers of what a step hands to the device."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

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
