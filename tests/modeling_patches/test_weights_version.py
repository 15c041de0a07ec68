"""Writes and replacements of tensors are noticed, those without a version count among them."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_spec.modeling_patches.weights import made_anew, weights_version


def fused_step(x: Tensor) -> None:
    """Torch's fused optimizers do not count as writes."""
    x.grad = torch.ones_like(x)
    torch.optim.AdamW([x], lr=1e-2, fused=True).step()


def small_fused_step(x: Tensor) -> None:
    """It changes one entry, none of those compared, as small steps in bfloat16 change few."""
    x.grad = torch.zeros_like(x)
    x.grad.view(-1)[-2:-1] = 1
    torch.optim.AdamW([x], lr=1e-2, weight_decay=0.0, fused=True).step()


def by_data(x: Tensor) -> None:
    x.data.mul_(0.5)


def in_place(x: Tensor) -> None:
    with torch.no_grad():
        x.view(-1)[-1] += 1  # one entry, which is none of those compared: it counts


def replaced(x: Tensor) -> None:
    x.data = x.data.clone()


def row(x: Tensor) -> None:
    """As an edit of a token's output embedding."""
    x.data.reshape(-1)[: x.shape[-1] if x.ndim > 1 else 1] = 0


def column(x: Tensor) -> None:
    x.data.reshape(-1)[:: x.shape[-1] if x.ndim > 1 else 1] = 0


@pytest.mark.parametrize(
    "write", [row, column, fused_step, small_fused_step, by_data, in_place, replaced]
)
@pytest.mark.parametrize("shape", [(3,), (40, 51), (51, 40), (40, 40), (3, 5, 7), ()])
def test_writes_are_noticed(write: Callable[[Tensor], None], shape: tuple[int, ...]) -> None:
    x, y = torch.nn.Parameter(torch.ones(shape)), torch.arange(9)
    before, kept = weights_version([y, x]), x.data
    assert weights_version([y, x]) == before
    write(x)
    assert weights_version([y, x]) != before
    del kept  # its address must not be given away until here


def test_kinds_of_tensors() -> None:
    with torch.inference_mode():
        made = torch.ones(3)
    nan, empty = torch.full((3,), torch.nan), torch.zeros(0)
    several = [nan, empty, torch.ones(5, dtype=torch.bfloat16), torch.ones(2, 3).T, made]
    assert weights_version(several) == weights_version(several), "NaN, too"
    assert weights_version([]) == weights_version([])


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5), (1, 7), (7, 1), (2, 3, 4), (64, 256)])
def test_each_row_and_column_is_compared(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    before = weights_version([x])
    flat = x.data.view(-1, shape[-1])
    for place in [*flat, *flat.T]:
        place.fill_(1)
        assert weights_version([x]) != before
        place.fill_(0)
    assert weights_version([x]) == before


def test_memory_of_weights_that_moved_is_freed() -> None:
    """What is made of weights does not hold them, and is made anew of those in their place."""
    store: dict[str, Any] = {}
    x, numbers = torch.nn.Parameter(torch.ones(3)), itertools.count()
    assert made_anew(store, "owner", [x], lambda: next(numbers)) == 0
    assert made_anew(store, "owner", [x], lambda: next(numbers)) == 0
    old = StorageWeakRef(x.untyped_storage())
    x.data = torch.ones(3)
    assert old.expired()
    assert made_anew(store, "owner", [x], lambda: next(numbers)) == 1
    # The same numbers at the same address, in memory that others had in between.
    memory = torch.ones(3).numpy()
    x.data = torch.from_numpy(memory)
    assert made_anew(store, "owner", [x], lambda: next(numbers)) == 2
    x.data = torch.from_numpy(memory)
    assert made_anew(store, "owner", [x], lambda: next(numbers)) == 3


def test_what_a_weight_that_is_empty_between_forwards_is_made_of_is_made_once() -> None:
    """DeepSpeed frees shards after each forward: their memory is another one, of no bytes."""
    store: dict[str, object] = {}
    x, numbers = torch.nn.Parameter(torch.empty(0)), iter(range(2))
    for _ in range(2):
        assert made_anew(store, "owner", [x], lambda: next(numbers)) == 0
        x.data = torch.empty(0)
