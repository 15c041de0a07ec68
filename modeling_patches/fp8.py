"""Weights of checkpoints that are stored as 8-bit floats with a scale for each block of them, as
DeepSeek-V3 is published ("DeepSeek-V3 Technical Report", 2024, section 3.3)."""

from collections.abc import Sequence

import torch
from torch import Tensor

#: What follows a tensor's name in that of its scales.
SCALES = "_scale_inv"
FP8 = torch.float8_e4m3fn
#: Rows and columns of a block.
BLOCK = 128


def dequantized(name: str, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a weight: its values times the scales of their blocks.

    Args:
        weight: ``(rows, columns)`` float8_e4m3fn
        scales: ``(rows / 128, columns / 128)``, rounded up.

    Raises:
        ValueError: there is not one scale per block.
    """
    check_scales(name, weight.shape, scales.shape)
    rows, columns = weight.shape
    found = torch.empty(rows, columns, dtype=dtype)
    for block, row in enumerate(scales.float()):  # few numbers at a time in float32
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        spread = row.repeat_interleave(BLOCK)[:columns]
        found[part] = (weight[part].float() * spread).to(dtype)
    return found


def check_scales(name: str, shape: Sequence[int], scales: Sequence[int]) -> None:
    """Raise a ValueError unless there is a scale for each block of a weight."""
    expected = tuple(-(-size // BLOCK) for size in shape)
    if len(shape) != 2 or tuple(scales) != expected:
        raise ValueError(
            f"{name + SCALES!r} has shape {tuple(scales)}: a weight of shape {tuple(shape)} has "
            f"one scale per block of {BLOCK} x {BLOCK}, which is {expected}"
        )
