"""Sizes and transfers of what a step hands to the device."""

from collections.abc import Sequence
from typing import Any

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


# -- Recurring sizes: code is compiled for each shape ----------------------------------------------


def bucket(count: int, parts: int = 1) -> int:
    """The smallest power of two that is at least ``count``; 0 for 0. With ``parts``, so many sizes
    lie between a power of two and the next, that one included."""
    if not count:
        return 0
    above = 1 << (count - 1).bit_length()
    step = max(above // (2 * parts), 1)
    return above if parts == 1 else -(-count // step) * step
