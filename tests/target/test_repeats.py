"""Captured graphs whose layers are alike: same results, each different part compiled once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from hf_spec.target.graph_parts import AnySize, compile_in_parts

LAYERS, WIDTH = 7, 4
AS_IT_IS = AnySize(lambda part, _: part)


class Layer(nn.Module):
    """Enough operations to count as a layer, with a write into its part of a cache."""

    def __init__(self, power: float = 2.0):
        super().__init__()
        self.weight, self.power = nn.Parameter(torch.randn(WIDTH, WIDTH)), power

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache[at] = x.nan_to_num()
        seen = (cache @ self.weight).softmax(0).cumsum(0).tanh() + 1
        return (x + seen.pow(self.power).mean(0).abs().sqrt().log1p().sin().cos()).relu()


def captured(layers: list[Layer], views: bool = True) -> tuple[Any, list[Tensor], Any]:
    """A function of a sequence of layers, its inputs, and its graph."""

    def function(x: Tensor, at: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        x, kept, same = x * 2, [], torch.ops.aten.alias(caches[2])
        for layer, cache in zip(layers, caches):
            x = layer(x, cache, at)
            kept.append(x)
        # The graph has caches[2] three times: as given, as its alias, and as written into.
        return x.exp(), kept[1], caches[2][:2] + same[2:4]

    storage = torch.randn(LAYERS, 6, WIDTH)
    caches = list(storage) if views else [part.clone() for part in storage]
    inputs = [torch.randn(2, WIDTH), torch.tensor([1, 4]), *caches]
    return function, inputs, traced(function, inputs)


@torch.no_grad()
def traced(function: Any, inputs: list[Tensor]) -> Any:
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def copies(inputs: list[Tensor]) -> list[Tensor]:
    """The same with memory of its own, where caches are views of one tensor."""
    return [*(x.clone() for x in inputs[:2]), *torch.stack(inputs[2:])]


@torch.no_grad()
def check(code: Any, function: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The same results, and the same written into the inputs, which are returned."""
    expected, other = copies(inputs), copies(inputs)
    torch.testing.assert_close(code(*other), function(*expected), rtol=0, atol=0)
    torch.testing.assert_close(other, expected, rtol=0, atol=0)
    return other


@pytest.mark.parametrize("views", [True, False])
def test_equal_parts_are_compiled_once(views: bool) -> None:
    function, inputs, graph = captured([Layer() for _ in range(LAYERS)], views)
    given = []

    def compile_part(part: Any, inputs: Any) -> Any:
        given.append((part, [x._is_view() for x in inputs]))
        return part

    code = compile_in_parts(graph, AnySize(compile_part))
    for _ in range(2):  # the second time with caches that the first has written into
        inputs = check(code, function, inputs)
    operations = [sum(node.op == "call_function" for node in part.graph.nodes) for part, _ in given]
    whole = sum(node.op == "call_function" for node in graph.graph.nodes)
    # The layer whose result is wanted is one more part.
    assert len(given) <= 4 and sum(operations) < whole
    assert not any(any(is_view) for _, is_view in given)


def test_layers_that_differ_in_a_number() -> None:
    """Every third layer is another; the period is then three layers."""
    function, inputs, graph = captured(
        [Layer(3.0 if index % 3 == 2 else 2.0) for index in range(LAYERS)]
    )
    check(compile_in_parts(graph, AS_IT_IS), function, inputs)


@torch.no_grad()
def test_parts_that_read_what_overlaps() -> None:
    """Columns of one product, and each layer's part of one input, which nothing writes."""
    layers, weight = [Layer() for _ in range(LAYERS)], torch.randn(WIDTH, 2 * WIDTH)

    def function(x: Tensor, at: Tensor, states: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        left, right = (x @ weight).split(WIDTH, dim=1)
        for place, (layer, cache) in enumerate(zip(layers, caches)):
            x = layer(x + left, cache, at) + right.sin() + states[place]
        return (x,)

    inputs = [torch.randn(2, WIDTH), torch.tensor([1, 4]), torch.randn(LAYERS, WIDTH)]
    inputs += list(torch.randn(LAYERS, 6, WIDTH))
    compiled: list[Any] = []
    parts = AnySize(lambda part, _: (compiled.append(part), part)[1])
    code = compile_in_parts(traced(function, inputs), parts)
    assert code is not None
    expected = function(*(one.clone() for one in inputs))
    torch.testing.assert_close(code(*inputs), expected, rtol=0, atol=0)
    assert len(compiled) <= 4


def test_nothing_recurs() -> None:
    function, inputs, graph = captured([Layer(float(index + 2)) for index in range(LAYERS)])
    compiled: list[Any] = []
    parts = AnySize(lambda part, _: (compiled.append(part), part)[1])
    check(compile_in_parts(graph, parts), function, inputs)
    assert len(compiled) == 1


def inputs_that_overlap() -> Any:
    """A part writes into memory which it also reads by another input."""
    layers = [Layer() for _ in range(LAYERS)]

    def function(x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        shifted = cache[1:]
        for layer in layers:
            x = layer(x, cache, at) + shifted[0]
        return x

    return traced(function, [torch.randn(2, WIDTH), torch.tensor([1, 4]), torch.randn(6, WIDTH)])


def constants_that_are_no_tensors() -> Any:
    """As the bodies of control flow, which operations take as arguments."""
    _, _, graph = captured([Layer() for _ in range(LAYERS)])
    graph.body = torch.fx.symbolic_trace(nn.Identity())
    last = graph.graph.output_node()
    with graph.graph.inserting_before(last):
        body = graph.graph.get_attr("body")
        applied = graph.graph.call_function(apply, (body, last.args[0][0]))
    last.args = ((applied, *last.args[0][1:]),)
    return graph


def apply(body: Any, x: Tensor) -> Any:
    return body(x)


@pytest.mark.parametrize("made", [inputs_that_overlap, constants_that_are_no_tensors])
def test_what_stays_whole(made: Any) -> None:
    graph = made()
    before = str(graph.graph)
    assert compile_in_parts(graph, AS_IT_IS) is None
    assert str(graph.graph) == before
