"""Code of captured graphs that serves other sizes, too.

Steps with trees of other sizes are the same operations on other shapes. So a graph is taken apart
into operations and numbers: those of its inputs' shapes, and integers among arguments. If all
numbers in which two graphs differ follow from one size (``n``, ``3 * n``, ``n + 1``), the second
graph is compiled for any size. A later graph runs by this code if its numbers, too, are just what
follows from one size, and if that is a size for which what the compiler has assumed holds.
"""

import copy
import logging
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_aggregate

logger = logging.getLogger(__name__)

Code: TypeAlias = Callable[..., Any]
#: From a graph, with example inputs that have no data, to code.
Compile = Callable[[fx.GraphModule, Sequence[Any]], Code]


@dataclass(eq=False)
class _Kept:
    """Code for one size, or for any.

    Attributes:
        numbers: of the graph that was compiled.
        growth: how numbers follow from a size; None if the code is for these numbers only.
        allows: whether the code can be used for a size.
    """

    code: Code
    numbers: Sequence[int]
    growth: "_Growth | None" = None
    allows: Callable[[int], bool] = bool

    def serving(self, numbers: Sequence[int]) -> Code | None:
        """The code for these numbers, if it serves them."""
        if self.growth is None:
            return self.code if numbers == self.numbers else None
        size = self.growth.size(numbers)
        if self.growth.numbers(size) != numbers or not self.allows(size):
            return None
        return partial(self.code, size)


class _Growth(NamedTuple):
    """Numbers ``slopes * size + offsets``; ``place`` is that of one which grows."""

    slopes: Sequence[int]
    offsets: Sequence[int]
    place: int

    @classmethod
    def between(cls, before: Sequence[int], now: Sequence[int]) -> "_Growth | None":
        """That of which these are two cases; None if the second has no size of at least two, which
        is the least that compilers treat like others."""
        differences = [new - old for old, new in zip(before, now, strict=True)]
        grown = [at for at, one in enumerate(differences) if one]
        place = min(grown, key=lambda at: abs(differences[at]))
        step = math.gcd(*differences) * (1 if differences[place] > 0 else -1)
        slopes = [one // step for one in differences]
        size = now[place] // slopes[place]
        if size < 2:
            return None
        return cls(slopes, [one - slope * size for one, slope in zip(now, slopes)], place)

    def size(self, numbers: Sequence[int]) -> int:
        """The only size that these can follow from."""
        return (numbers[self.place] - self.offsets[self.place]) // self.slopes[self.place]

    def numbers(self, size: Any) -> list[Any]:
        """What follows from a size."""
        pairs = zip(self.slopes, self.offsets)
        return [slope * size + offset if slope else offset for slope, offset in pairs]


class AnySize:
    """The code of graphs whose inputs are tensors, by what they do.

    Args:
        compile: called once for graphs that share code, whose first input may be an integer.
    """

    def __init__(self, compile: Compile):
        self._compile = compile
        self._kept: dict[Hashable, list[_Kept]] = defaultdict(list)

    def __call__(self, body: fx.GraphModule) -> Code:
        """Code for a captured graph, which is left as it is."""
        operations, numbers = _apart(body)
        kept = self._kept[operations]
        for one in kept:
            if (code := one.serving(numbers)) is not None:
                return code
        growths = filter(None, (_Growth.between(one.numbers, numbers) for one in kept))
        # What differs least, such as the size of trees, but not that of the cache, too.
        growth = min(growths, key=lambda one: sum(map(bool, one.slopes)), default=None)
        if growth is not None:
            try:
                kept.append(self._for_any(body, numbers, growth))
                return partial(kept[-1].code, growth.size(numbers))
            except Exception:  # a compiler may raise anything, and do better with one size
                logger.debug("compiling for any size", exc_info=True)
        code = self._compile(body, _examples(body, iter(numbers), ShapeEnv()))
        kept.append(_Kept(code, numbers))
        return code

    def _for_any(self, body: fx.GraphModule, numbers: Sequence[int], growth: _Growth) -> _Kept:
        env, now = ShapeEnv(), growth.size(numbers)
        symbol = env.create_symbol(now, ConstantSource("size"), DimDynamic.DYNAMIC)
        size = env.create_symintnode(symbol, hint=now)
        examples = _examples(body, iter(growth.numbers(size)), env)
        code = self._compile(_with_size(body, growth), [size, *examples])

        def allows(size: int) -> bool:
            met = (bool(guard.expr.subs(symbol, size)) for guard in env.guards)
            return size in env.var_to_range[symbol] and all(met)

        return _Kept(code, numbers, growth, allows)


def _apart(body: fx.GraphModule) -> tuple[Hashable, list[int]]:
    """A graph without its numbers and the names of its nodes, and the numbers: first of inputs."""
    order = {node: index for index, node in enumerate(body.graph.nodes)}
    numbers: list[int] = []

    def without_number(value: Any) -> Any:
        if type(value) is int:
            numbers.append(value)
            return ...
        return f"%{order[value]}" if isinstance(value, fx.Node) else value

    layouts = []
    for node in body.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        numbers += _layout(value)
        layouts.append((value.ndim, value.is_contiguous(), value.dtype, value.device))
    operations = tuple(
        (
            node.op, node.target if node.op == "call_function" else None,
            repr(map_aggregate((node.args, node.kwargs), without_number)),
        )
        for node in body.graph.nodes
    )  # fmt: skip
    return (tuple(layouts), operations), numbers


def _with_size(body: fx.GraphModule, growth: _Growth) -> fx.GraphModule:
    """The graph with a size as its first input, from which its numbers follow."""
    graph = copy.deepcopy(body.graph)
    nodes, inputs = list(graph.nodes), graph.find_nodes(op="placeholder")
    start = inputs[0] if inputs else nodes[0]
    with graph.inserting_before(start):
        size = graph.placeholder("size")
    operations = next(node for node in nodes if node.op != "placeholder")
    rest = iter(zip(growth.slopes, growth.offsets))
    for _ in chain.from_iterable(_layout(node.meta["val"]) for node in inputs):
        next(rest)

    @cache
    def computed(slope: int, offset: int) -> fx.Node:
        with graph.inserting_before(operations):
            product = graph.call_function(operator.mul, (size, slope))
            return graph.call_function(operator.add, (product, offset))

    def following(value: Any) -> Any:
        if type(value) is not int:
            return value
        slope, offset = next(rest)
        return computed(slope, offset) if slope else value

    for node in nodes:
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), following)
        node.meta = {}  # of one size
    return fx.GraphModule(body, graph)


def _examples(body: fx.GraphModule, numbers: Iterator[Any], env: ShapeEnv) -> list[Tensor]:
    """Inputs without data, of layouts of these numbers."""
    examples = []
    with FakeTensorMode(shape_env=env):
        for value in (node.meta["val"] for node in body.graph.find_nodes(op="placeholder")):
            layout = list(islice(numbers, len(_layout(value))))
            shape, strides = layout[: value.ndim], layout[value.ndim :]
            example = torch.empty(shape, dtype=value.dtype, device=value.device)
            examples.append(example.new_empty_strided(shape, strides) if strides else example)
    return examples


def _layout(value: Tensor) -> Sequence[int]:
    """The numbers of a layout: a shape, and strides where the shape does not tell them."""
    return (*value.shape, *(() if value.is_contiguous() else value.stride()))
