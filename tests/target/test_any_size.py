"""Graphs that differ in one size share their code, and get the results of their own."""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hf_spec.target.graph_parts import AnySize

WIDTH = 4


def step(x: Tensor, mask: Tensor, packed: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """Sizes ``n``, ``3 * n``, ``n + 1`` and ``2 * n + 3``, strides of views, and a write."""
    size = len(x)
    cache[at] = x
    scores = (x @ cache.T)[:, : size + 1]
    likely = scores.topk(size - 1).values
    words = (mask.int() * torch.arange(size)).sum(1) + packed[3:].view(2, size).sum(0)
    return torch.cat([x, x.cos(), x]).view(3, size, WIDTH), likely, words.clamp(max=size + 1)


def inputs(size: int) -> list[Tensor]:
    torch.manual_seed(size)
    mask = torch.rand(size, size) > 0.5
    wide = torch.randn(size, 2 * WIDTH)
    cache = torch.randn(40, WIDTH)
    return [wide[:, ::2], mask, torch.arange(2 * size + 3), cache, torch.arange(size) + 2]


def captured(function: Any, given: list[Tensor]) -> fx.GraphModule:
    graph: Any = make_fx(function, tracing_mode="fake")(*given)
    return graph


class Compiler:
    """Runs graphs as they are and notes them; ``assumes`` is what it asks of a size."""

    def __init__(self, assumes: Any = lambda size: True):
        self.made: list[Any] = []
        self.assumes = assumes

    def __call__(self, graph: fx.GraphModule, examples: Any) -> Any:
        size = examples[0]
        self.made.append(bool(self.assumes(size)) if isinstance(size, torch.SymInt) else None)
        return graph


def check(codes: AnySize, size: int, function: Any = step) -> None:
    code = codes(captured(function, inputs(size)))
    own, other = inputs(size), inputs(size)
    torch.testing.assert_close(code(*own), function(*other), rtol=0, atol=0)
    torch.testing.assert_close(own, other, rtol=0, atol=0)


def test_the_second_serves_all() -> None:
    compiler = Compiler()
    codes = AnySize(compiler)
    for size in (5, 3, 9, 8, 3, 5, 17):
        check(codes, size)
    assert compiler.made == [None, True]


def test_what_a_compiler_assumes() -> None:
    """Other sizes are compiled for once more."""
    compiler = Compiler(lambda size: size > 6)
    codes = AnySize(compiler)
    for size in (3, 9, 12, 7, 5, 4, 15):
        check(codes, size)
    assert compiler.made == [None, True, False]


def test_one_is_not_any_size() -> None:
    """Operations on dimensions of size one do something else, such as to expand them."""
    compiler = Compiler()
    codes = AnySize(compiler)

    def function(x: Tensor, *others: Tensor) -> Tensor:
        return x.cumsum(0) + x.sum(0, keepdim=True)

    for size in (4, 3, 1, 2, 1):
        check(codes, size, function)
    assert compiler.made == [None, True, None]


def test_a_number_that_does_not_follow() -> None:
    """A power of two, or a share: such graphs get code of their own."""
    compiler = Compiler()
    codes = AnySize(compiler)

    def function(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        return x[: min(len(x), 6)] * 2, x.new_ones(len(x) // 2)

    for size in (4, 5, 6, 9, 8, 4, 9):
        check(codes, size, function)
    assert None in compiler.made[1:] or compiler.made.count(True) > 1


def test_what_compiles_for_one_size_only() -> None:
    codes = AnySize(Compiler(lambda size: size.no_such_attribute))
    for size in (3, 5, 5, 9):
        check(codes, size)


@pytest.mark.environment  # a C++ compiler's time
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_by_a_compiler() -> None:
    made = []

    def compile_it(graph: fx.GraphModule, examples: Any) -> Any:
        made.append(type(examples[0]))
        return torch._inductor.compile(graph, examples)

    codes = AnySize(compile_it)
    for size in (5, 3, 9, 16):
        code = codes(captured(step, inputs(size)))
        own, other = inputs(size), inputs(size)
        torch.testing.assert_close(tuple(code(*own)), step(*other))
        torch.testing.assert_close(own, other)
    assert made[1] is torch.SymInt and len(made) == 2
