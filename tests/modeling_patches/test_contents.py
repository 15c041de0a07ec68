"""Writes and replacements of tensors are noticed, those without a version count among them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from modeling_patches.contents import contents


def fused_step(x: Tensor) -> None:
    """Torch's fused optimizers do not count as writes."""
    x.grad = torch.ones_like(x)
    torch.optim.AdamW([x], lr=1e-2, fused=True).step()


def by_data(x: Tensor) -> None:
    x.data.mul_(0.5)


def in_place(x: Tensor) -> None:
    with torch.no_grad():
        x.view(-1)[-1] += 1  # one entry, which is none of those compared: it counts


def replaced(x: Tensor) -> None:
    x.data = x.data.clone()


@pytest.mark.parametrize("write", [fused_step, by_data, in_place, replaced])
@pytest.mark.parametrize("shape", [(3,), (40, 51), ()])
def test_writes_are_noticed(write: Callable[[Tensor], None], shape: tuple[int, ...]) -> None:
    x, y = torch.nn.Parameter(torch.ones(shape)), torch.arange(9)
    before, kept = contents([y, x]), x.data
    assert contents([y, x]) == before
    write(x)
    assert contents([y, x]) != before
    del kept  # its address must not be given away until here


def test_kinds_of_tensors() -> None:
    with torch.inference_mode():
        made = torch.ones(3)
    nan, empty = torch.full((3,), torch.nan), torch.zeros(0)
    several = [nan, empty, torch.ones(5, dtype=torch.bfloat16), torch.ones(2, 3).T, made]
    assert contents(several) == contents(several), "NaN, too"
    assert contents([]) == contents([])
