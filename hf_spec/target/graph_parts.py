"""Compiled parts of a graph: those that repeat, and those whose sizes differ, share code."""

import copy
import logging
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_aggregate, map_arg
from torch.fx.passes.split_module import split_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

# -- Code of captured graphs that serves other sizes, too ------------------------------------------
#
# Steps with trees of other sizes are the same operations on other shapes. So a graph is taken apart
# into operations and numbers: those of its inputs' shapes, and integers among arguments. If all
# numbers in which two graphs differ follow from one size (``n``, ``3 * n``, ``n + 1``), the second
# graph is compiled for any size. A later graph runs by this code if its numbers, too, are just what
# follows from one size, and if that is a size for which what the compiler has assumed holds.

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


# -- Captured graphs in which the same operations recur, as in a decoder's layers: compiled once ---
#
# Compiling takes time in proportion to a graph's length, and most of a decoder is one layer again
# and again. Its graph is cut into what comes before the layers, each layer, and what comes after.

#: Fewest operations that count as a layer.
SHORTEST = 16
#: Number of periods that are tried, those of the most operations.
_TRIED = 16


def compile_in_parts(
    captured: fx.GraphModule, code_of: Callable[[fx.GraphModule], Code]
) -> Code | None:
    """Code for a graph of tensors, cut into parts where they recur.

    Args:
        code_of: from a part to code, which equal parts share.

    Returns:
        A function of the graph's inputs; None if parts would read what they write through another
        input, or if they have inputs that are no tensors.
    """
    captured = fx.GraphModule(captured, copy.deepcopy(captured.graph))
    for node in captured.graph.nodes:
        # Its result is its first argument, which it may have written into: no part must get both.
        if re.fullmatch(r"aten\.(alias|\w+_)\.\w+", str(node.target)):
            node.replace_all_uses_with(node.args[0])
    start = next(node for node in captured.graph.nodes if node.op != "placeholder")
    for node in captured.graph.find_nodes(op="call_function", target=torch.ops.aten.select.int):
        if node.args[0].op == "placeholder":  # a layer's part of an input of all layers
            start.prepend(node)
    operations = [node for node in captured.graph.nodes if node.op == "call_function"]
    first, period, count = _recurring([_signature(node) for node in operations])
    constants = _constants_to_inputs(captured)
    part = {
        node: min(max((index - first) // period + 1, 0), count + 1) if count > 1 else 0
        for index, node in enumerate(operations)
    }
    cut = split_module(captured, captured, part.__getitem__, keep_original_order=True)
    bodies: dict[Any, Any] = dict(cut.named_children())
    if not all(map(_separate, bodies.values())):
        return None
    for name, body in bodies.items():
        delattr(cut, name)
        vars(cut)[name] = code_of(body)  # called as it is, not as a module
    return lambda *inputs: cut.forward(*inputs, *constants)


def _recurring(kinds: Sequence[Hashable]) -> tuple[int, int, int]:
    """Where a sequence repeats itself longest: first index, period and number of periods."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for index, kind in enumerate(kinds):
        places[kind].append(index)
    gaps = Counter(
        later - earlier
        for found in places.values()
        for earlier, later in pairwise(found)
        if later - earlier >= SHORTEST
    )
    best = 0, 1, 1
    for period, _ in gaps.most_common(_TRIED):
        start = 0
        for index in range(len(kinds) - period + 1):
            ends = index == len(kinds) - period or kinds[index] != kinds[index + period]
            if ends:
                count = (index - start) // period + 1
                if period * (count - 1) > best[1] * (best[2] - 1):
                    best = start, period, count
                start = index + 1
    return best


def _signature(node: fx.Node) -> Hashable:
    """What an operation is, whatever tensors it works on."""
    return node.target, repr(map_arg((node.args, node.kwargs), lambda _: None)), _layout_of(node)


def _layout_of(node: fx.Node) -> Hashable:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return str(type(value))
    return value.shape, value.stride(), value.dtype, value.device


def _separate(body: fx.GraphModule) -> bool:
    """Whether inputs are tensors, and those that are written share no memory with others: they may
    be different layers' parts of a buffer."""
    ends: dict[StorageWeakRef, int] = {}
    nodes = body.graph.find_nodes(op="placeholder")
    inputs: list[Any] = [node.meta.get("val") for node in nodes]
    if not all(isinstance(value, Tensor) for value in inputs):
        return False
    written = {StorageWeakRef(tensor.untyped_storage()) for tensor in _written(body)}
    for tensor in sorted(inputs, key=lambda tensor: tensor.storage_offset()):
        place = StorageWeakRef(tensor.untyped_storage())
        if place not in written:
            continue
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        if tensor.storage_offset() < ends.get(place, 0):
            return False
        ends[place] = tensor.storage_offset() + last + 1
    return True


def _written(body: fx.GraphModule) -> Iterator[Tensor]:
    """What operations write into."""
    for node in body.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            for given, argument in zip(node.args, node.target._schema.arguments):
                if argument.is_write:
                    yield from (one.meta["val"] for one in tree_leaves(given))


def _constants_to_inputs(captured: fx.GraphModule) -> list[Tensor]:
    """Make inputs of a graph's constants, in which layers differ."""
    graph = captured.graph
    start = next(node for node in graph.nodes if node.op != "placeholder")
    lifted: dict[Any, fx.Node] = {}
    constants = []
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(captured, node.target)
        if node.target not in lifted:
            with graph.inserting_before(start):
                lifted[node.target] = graph.placeholder(node.target)
            lifted[node.target].meta = {"val": value}
            constants.append(value)
        node.replace_all_uses_with(lifted[node.target])
        graph.erase_node(node)
    captured.recompile()
    return constants
