"""Weights that are stored as 8-bit floats with scales."""

import pytest
import torch
from torch import Tensor

from hf_spec.modeling_patches.weights import FP8, dequantized


def quantized(weight: Tensor, size: int = 128) -> tuple[Tensor, Tensor]:
    """Values and scales, one block after the other."""
    rows, columns = weight.shape
    values = torch.zeros(rows, columns, dtype=FP8)
    scales = torch.zeros(-(-rows // size), -(-columns // size))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size)
            scales[row, column] = weight[place].abs().max() / 448
            values[place] = (weight[place] / scales[row, column]).to(FP8)
    return values, scales


@pytest.mark.parametrize("shape", [(300, 130), (128, 256), (5, 7)])
def test_each_block_has_its_scale(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.linspace(0.01, 10, shape[0])[:, None]
    values, scales = quantized(weight)
    found = dequantized("w", values, scales, torch.float32)
    for row in range(shape[0]):
        for column in range(0, shape[1], 9):
            expected = float(values[row, column]) * float(scales[row // 128, column // 128])
            assert float(found[row, column]) == pytest.approx(expected, rel=1e-6)
    # Three bits of mantissa; the smallest numbers of a block have fewer.
    torch.testing.assert_close(found, weight, rtol=2**-4, atol=float(scales.max()) * 2**-9)
    half = dequantized("w", values, scales, torch.bfloat16)
    assert torch.equal(half, found.bfloat16())


def test_scales_of_another_block_size() -> None:
    values, scales = quantized(torch.randn(128, 128), 64)
    with pytest.raises(ValueError, match=r"'w_scale_inv' has shape \(2, 2\).* which is \(1, 1\)"):
        dequantized("w", values, scales, torch.float32)
