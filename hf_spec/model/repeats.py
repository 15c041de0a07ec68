"""Captured graphs in which the same operations recur, as in a decoder's layers: compiled once.

Compiling takes time in proportion to a graph's length, and most of a decoder is one layer again and
again. Its graph is cut into what comes before the layers, each layer, and what comes after. Parts
of the same operations on tensors of the same layouts share their code.
"""

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

#: Fewest operations that count as a layer.
SHORTEST = 16
#: Number of periods that are tried, those of the most operations.
_TRIED = 16

#: From a part of a graph, with example inputs, to code.
Compile = Callable[[fx.GraphModule, Sequence[Tensor]], Callable[..., Any]]


def compile_once(captured: fx.GraphModule, compile_part: Compile) -> Callable[..., Any] | None:
    """Code for a graph of tensors, in which parts that recur are compiled once, as they first run.

    Returns:
        A function of the graph's inputs; None if nothing recurs, if parts would read what they
        write through another input, or if they have inputs that are no tensors.
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
    if count < 2:
        return None
    constants = _constants_to_inputs(captured)
    part = {
        node: min(max((index - first) // period + 1, 0), count + 1)
        for index, node in enumerate(operations)
    }
    cut = split_module(captured, captured, part.__getitem__, keep_original_order=True)
    codes: dict[Hashable, _Code] = {}
    for node in cut.graph.nodes:
        if node.op == "call_module":
            body: Any = cut.get_submodule(node.target)
            if not _separate(body):
                return None
            kind = _operations(body), tuple(map(_layout, _inputs(body)))
            code = codes.setdefault(kind, _Code(body, compile_part))
            delattr(cut, node.target)
            vars(cut)[node.target] = code  # called as it is, not as a module
    return lambda *inputs: cut.forward(*inputs, *constants)


class _Code:
    """A part that is compiled when it first runs."""

    def __init__(self, body: fx.GraphModule, compile_part: Compile):
        self._body, self._compile_part = body, compile_part
        self._code: Callable[..., Any] | None = None

    def __call__(self, *inputs: Tensor) -> Any:
        if self._code is None:
            # Code made for views would begin with their base.
            alone = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                for x in inputs
            ]
            self._code = self._compile_part(self._body, alone)
        return self._code(*inputs)


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
    return node.target, repr(map_arg((node.args, node.kwargs), lambda _: None)), _layout(node)


def _layout(node: fx.Node) -> Hashable:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return str(type(value))
    return value.shape, value.stride(), value.dtype, value.device


def _inputs(body: fx.GraphModule) -> list[fx.Node]:
    return list(body.graph.find_nodes(op="placeholder"))


def _separate(body: fx.GraphModule) -> bool:
    """Whether inputs are tensors, and those that are written share no memory with others: they may
    be different layers' parts of a buffer."""
    ends: dict[StorageWeakRef, int] = {}
    inputs: list[Any] = [node.meta.get("val") for node in _inputs(body)]
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


def _operations(body: fx.GraphModule) -> Hashable:
    """A graph without the names of its nodes."""
    order = {node: index for index, node in enumerate(body.graph.nodes)}
    return tuple(
        (
            node.op, node.target if node.op == "call_function" else None,
            repr(map_arg((node.args, node.kwargs), lambda node: f"%{order[node]}")),
        )
        for node in body.graph.nodes
    )  # fmt: skip


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
