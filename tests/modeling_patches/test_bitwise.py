"""Paths of trees in the slots of a cache, and which products give the bits of single ones."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_patches import bitwise
from modeling_patches.bitwise import _Behind, at_once, batched, one_by_one, paths, product

pytestmark = pytest.mark.instructions

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(5))
def test_each_path_stands_behind_the_prefix(seed: int) -> None:
    draw = random.Random(seed)
    parents = [-1, *(draw.randrange(node) for node in range(1, 12))]
    states = torch.arange(12.0).view(1, 1, 12, 1)
    view = states.clone()
    behind, seen = _Behind(view), []
    for node, path in paths(parents):
        behind.hold(path)
        naive = [node]
        while naive[0]:
            naive.insert(0, parents[naive[0]])
        assert path == naive and view[0, 0, : len(path), 0].tolist() == path
        seen.append(node)
    behind.hold(range(12))
    assert sorted(seen) == [*range(12)] and torch.equal(view, states)


def test_a_chain_stays_where_it_is() -> None:
    behind = _Behind(torch.zeros(1, 1, 5, 1))
    for _, path in paths([-1, 0, 1, 2, 3]):
        behind.hold(path)
    assert not behind.states


def by_rows(inputs: Tensor, weight: Tensor, bias: Tensor | None, *, turns: bool) -> Tensor:
    """A product whose result for several nodes has the terms turned round, or not."""
    outputs = []
    for node in inputs.unbind(1):
        if turns and inputs.shape[1] > 1:
            node, factor = node.flip(-1), weight.flip(0)
        else:
            factor = weight
        terms = node[:, :, None] * factor
        total = torch.zeros_like(terms[:, 0]) if bias is None else bias.expand_as(terms[:, 0])
        for term in terms.unbind(1):
            total = total + term
        outputs.append(total)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_order_of_terms_is_noticed(dtype: torch.dtype, batch: int, bias: bool) -> None:
    shape = (33, 8)
    tried = {
        turns: product(partial(by_rows, turns=turns), shape, dtype, CPU, bias, batch, 3, 1)
        for turns in (False, True)
    }
    assert tried[False] is at_once and tried[True] in (batched, one_by_one)


@pytest.mark.parametrize("kind", ["LINEAR", "_conv1d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_single_products(dtype: torch.dtype, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    multiply: Any = getattr(bitwise, kind)
    for shape in ((96, 33), (48, 160)):
        for batch, nodes, biased in ((1, 5, True), (1, 16, False), (3, 4, True)):
            threads = torch.get_num_threads()
            way = product(multiply, shape, dtype, CPU, biased, batch, nodes, threads)
            weight = torch.randn(shape, generator=generator).to(dtype)
            outputs, features = shape if kind == "LINEAR" else shape[::-1]
            inputs = torch.randn(batch, nodes, features, generator=generator).to(dtype)
            bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
            whole = torch.contiguous_format  # as a step's inputs are, also strides of single rows
            steps = [node.clone(memory_format=whole) for node in inputs.split(1, 1)]
            single = [multiply(step, weight, bias) for step in steps]
            found = way(multiply, inputs, weight, bias)
            assert torch.equal(found, torch.cat(single, 1)) and found.is_contiguous()


def test_trials_leave_random_numbers_alone() -> None:
    torch.manual_seed(5)
    first = torch.rand(3)
    torch.manual_seed(5)
    product.__wrapped__(bitwise.LINEAR, (8, 8), torch.float32, CPU, True, 1, 2, 1)
    assert torch.equal(torch.rand(3), first)
