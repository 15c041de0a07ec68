"""Captured graphs in which the same operations recur, as in a decoder's layers: compiled once.

Compiling takes time in proportion to a graph's length, and most of a decoder is one layer again and
again. Its graph is cut into what comes before the layers, each layer, and what comes after.
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

from hf_spec.model.any_size import Code

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
