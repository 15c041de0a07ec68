"""Forwards over the nodes of trees that compute each node as a forward over it alone does.

Rounding depends on the order in which terms are added, and so on a kernel's shapes. Two places of a
decoder mix numbers, and here both add them as a step over a single token per row does, so that
results are equal bit for bit:

* **Attention** takes one node at a time, over exactly its keys: those of the prefix and of its
  ancestors, in order, in the slots where they stand if its path is all there is.
* **A linear module** takes all nodes at once where its kernel adds the terms in the same order for
  several rows as for one. Whether it does is tried once for each shape (:func:`product`);
  otherwise there is a product for each node.

Activations are computed for all nodes at once where a CPU's vectors have no rest
(:func:`in_whole_vectors`), and otherwise node by node, too.

This module knows nothing of hf_spec. Everything else in a decoder must compute row by row, such as
norms and rotations. :func:`obstacle` names modules that don't.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.activations import ACT2CLS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from modeling_patches.attention_masks import grouped_sdpa, local_attention
from modeling_patches.modules import decoder_of
from modeling_patches.per_call import Changes, plain

#: The attention implementation that can be taken apart.
SDPA = "sdpa"
#: Modules that map single numbers.
_ACTIVATIONS = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
#: Numbers in two of the longest vectors of a CPU, which PyTorch's loops take at once.
_VECTORS = 64
#: Numbers that PyTorch gives to a thread at least.
_PER_THREAD = 32768


class Nodes(NamedTuple):
    """The nodes of a forward."""

    #: Slot of each row's root, front slots not counted.
    starts: Sequence[int]
    #: Of each row, the parent of each node with a token, before it; -1 for the root.
    parents: Sequence[Sequence[int]]
    #: Number of learned slots before the first one.
    front: int = 0


class Bitwise:
    """Lets forwards within ``changes`` compute each node as a forward over it alone does.

    Args:
        model: a causal language model without an :func:`obstacle`.
        arranged: products of linear modules with arranged weights.
        arrange: what has made these.

    Attributes:
        nodes: of the next forward, to be set before it.
        products: how the linear modules of each shape have computed so far, by name.
    """

    def __init__(
        self, model: Any, changes: Changes, arranged: Mapping[nn.Module, Arranged],
        arrange: Arrange,
    ):  # fmt: skip
        self._arranged, self._arrange = arranged, arrange
        self._found: dict[tuple[nn.Module, int], Callable[[Tensor], Tensor]] = {}
        self.nodes = Nodes([], [])
        self.products: dict[str, str] = {}
        self._windows = any(local_attention(model).values())
        changes.instead(AttentionInterface, SDPA, self._attention)
        for module in _modules(model):
            if (kind := _kind(module)) is not None:
                changes.instead(module, "forward", partial(self._product, module, kind))
            elif type(module) in _ACTIVATIONS:
                changes.instead(module, "forward", partial(self._activation, module))

    @property
    def tried(self) -> int:
        """Number of shapes that were tried so far, by any call."""
        return product.cache_info().misses

    def _product(self, module: Any, kind: Product, inputs: Tensor) -> Tensor:
        """The output of a linear module for ``(batch, nodes, features)``."""
        apart = self._apart(inputs)
        if apart is None:
            shape = tuple(inputs.shape)
            raise ValueError(f"nodes cannot be told apart in an input {shape} of its linear layers")
        nodes = apart.shape[1]
        found = self._found.get((module, nodes))
        if found is None:
            found = self._found[module, nodes] = self._way(module, kind, nodes)
        made = found(apart.contiguous())
        return made.flatten(0, 1) if inputs.ndim == 2 else made

    def _apart(self, inputs: Tensor) -> Tensor | None:
        """``(batch, nodes, features)`` of inputs that may be flat; None for other shapes."""
        batch = len(self.nodes.starts)
        if inputs.ndim == 2 and len(inputs) % batch == 0:
            return inputs.unflatten(0, (batch, -1))
        return inputs if inputs.ndim == 3 and len(inputs) == batch else None

    def _way(self, module: Any, kind: Product, nodes: int) -> Callable[[Tensor], Tensor]:
        """The fastest way to the output of a linear module for so many nodes."""
        weight, bias, own = module.weight, module.bias, self._arranged.get(module)
        if nodes == 1 and own is None:
            return lambda inputs: kind(inputs, weight, bias)
        way = product(
            kind, tuple(weight.shape), weight.dtype, weight.device, bias is not None,
            len(self.nodes.starts), nodes, torch.get_num_threads(),
            None if own is None else self._arrange,
        )  # fmt: skip
        name = "arranged" if way is None else way.__name__
        self.products[f"{tuple(weight.shape)}, {nodes} nodes"] = name
        if way is None and own is not None:
            return lambda inputs: own(inputs, bias)
        assert way is not None
        return lambda inputs: way(kind, inputs, weight, bias)

    def _activation(self, module: Any, inputs: Tensor) -> Tensor:
        """The output of an activation for ``(batch, nodes, features)``."""
        run, apart = plain(module, "forward"), self._apart(inputs)
        if apart is None or apart.shape[1] == 1:
            return run(inputs)
        alone, together = apart[:, 0].numel(), apart.numel()
        if all(in_whole_vectors(count, inputs.device) for count in (alone, together)):
            return run(inputs)
        made = torch.cat([run(node.contiguous()) for node in apart.split(1, 1)], 1)
        return made.flatten(0, 1) if inputs.ndim == 2 else made

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        dropout: float = 0.0, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """``sdpa``, one node after the other; probes, which come last, all at once."""
        stock, nodes = ALL_ATTENTION_FUNCTIONS[SDPA], self.nodes
        stock = getattr(stock, "plain", stock)
        count, window = len(nodes.parents[0]), kwargs.get("sliding_window")
        if self._windows and "sliding_window" not in kwargs:
            raise ValueError(f"its {type(module).__name__} does not say which window it attends to")
        rows = []
        for row, (start, parents) in enumerate(zip(nodes.starts, nodes.parents)):
            first, own = start + nodes.front, slice(row, row + 1)
            queries, keys, values = query[own], key[own], value[own]
            behind = _Behind(keys.narrow(2, first, count), values.narrow(2, first, count))
            outputs: list[Any] = [None] * count
            for node, path in paths(parents):
                behind.hold(path)
                end = start + len(path)
                skipped = 0 if window is None else max(end - window, 0)
                seen = nodes.front + skipped, end - skipped
                # Plain generation has an explicit mask, without gaps, once a window is full.
                full = window is not None and end >= window
                outputs[node], _ = stock(
                    module, queries.narrow(2, node, 1), keys.narrow(2, *seen),
                    values.narrow(2, *seen),
                    query.new_ones((1, 1, 1, end - skipped), dtype=torch.bool) if full else None,
                    dropout=dropout, **kwargs,
                )  # fmt: skip
            behind.hold(range(count))
            rows.append(torch.cat(outputs, 1))
        output = torch.cat(rows) if len(rows) > 1 else rows[0]
        if query.shape[2] == count:
            return output, None
        mask = None if attention_mask is None else attention_mask[:, :, count:]
        probes, _ = grouped_sdpa(
            module, query[:, :, count:], key, value, mask, dropout=dropout, **kwargs
        )
        return torch.cat([output, probes], 1), None


def paths(parents: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Each node of a tree with its path from the root, in an order in which few paths differ by
    more than their ends: depth first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent if node else -1, []).append(node)
    open_paths = [[0]]
    while open_paths:
        path = open_paths.pop()
        yield path[-1], path
        open_paths += [[*path, node] for node in reversed(children.get(path[-1], ()))]


class _Behind:
    """The slots behind a row's prefix, which hold the keys and values of one path at a time."""

    def __init__(self, *views: Tensor):  # (1, heads, nodes, dim), with each node in its slot
        self.views, self.held = views, list(range(views[0].shape[2]))
        self.states: list[Tensor] = []

    def hold(self, path: Sequence[int]) -> None:
        """Put the states of these nodes into the first slots."""
        wanted = [(slot, node) for slot, node in enumerate(path) if self.held[slot] != node]
        if wanted and not self.states:
            self.states = [view.clone() for view in self.views]
        for slot, node in wanted:
            self.held[slot] = node
            for view, states in zip(self.views, self.states):
                view[:, :, slot] = states[:, :, node]


def in_whole_vectors(elements: int, device: torch.device) -> bool:
    """Whether a function of so many single numbers leaves none over. PyTorch divides them among
    threads and vectors; what is left over on a CPU is computed by other code."""
    if device.type != "cpu" or not elements:
        return True
    parts = min(torch.get_num_threads(), -(-elements // _PER_THREAD))
    return -(-elements // parts) % _VECTORS == 0


# -- products --------------------------------------------------------------------------------------

#: Multiplies ``(batch, nodes, features)`` with a weight and adds a bias, or None.
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
#: The same for several nodes, given the product for one.
Way = Callable[[Product, Tensor, Tensor, Tensor | None], Tensor]
#: Multiplies with a weight that it holds in an order of its own, and adds a bias, or None.
Arranged = Callable[[Tensor, Tensor | None], Tensor]
#: Makes such a product of a weight.
Arrange = Callable[[Tensor], Arranged]
LINEAR: Product = nn.functional.linear


def _conv1d(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = inputs.reshape(-1, inputs.shape[-1])
    made = torch.mm(flat, weight) if bias is None else torch.addmm(bias, flat, weight)
    return made.view(*inputs.shape[:-1], -1)


def at_once(kind: Product, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """All nodes in one product."""
    return kind(inputs, weight, bias)


def batched(kind: Product, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product for each node, in one call."""
    factor = (weight.T if kind is LINEAR else weight).expand(inputs.shape[1], -1, -1)
    nodes = inputs.transpose(0, 1)
    made = torch.bmm(nodes, factor) if bias is None else torch.baddbmm(bias, nodes, factor)
    # Functions of single numbers may round otherwise where these are not next to one another.
    return made.transpose(0, 1).contiguous()


def one_by_one(kind: Product, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A call for each node."""
    # Tensors of their own, as a step's: where a part starts in the middle of a vector, MKL adds its
    # terms in another order, and in 16 bits its product may take twenty times as long.
    own = torch.contiguous_format
    nodes = [node.clone(memory_format=own) for node in inputs.split(1, 1)]
    return torch.cat([kind(node, weight, bias) for node in nodes], 1)


@functools.cache
@torch.no_grad()
def product(
    kind: Product, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, bias: bool,
    batch: int, nodes: int, threads: int, arrange: Arrange | None = None,
) -> Way | None:  # fmt: skip
    """The fastest way to multiply so many nodes that gives the bits of a product for each.

    It is tried on random terms whose exact sum is zero: what is left of it is its rounding, which
    differs in almost every output if terms are added in another order. Kernels depend on shapes,
    not on values. The caller's random generators are not used.

    Args:
        shape: of the weight.
        threads: those that products run in, on which their order may depend.
        arrange: arranges a weight, to try the product with it first.

    Returns:
        None if it is that product.
    """
    features, outputs = shape[::-1] if kind is LINEAR else shape
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cpu").to(device, dtype)

    half = features // 2
    order = torch.randperm(half, generator=generator, device="cpu").to(device)
    own, block = random(batch, nodes, half), random(min(outputs, 512), half)
    weight = torch.cat([block, -block[:, order], block.new_zeros(len(block), features % 2)], 1)
    weight = weight.repeat(-(-outputs // len(block)), 1)[:outputs].contiguous()
    inputs = torch.cat([own, own[..., order], own.new_zeros(batch, nodes, features % 2)], 2)
    if kind is not LINEAR:
        weight = weight.T.contiguous()
    added = random(outputs) * 2**-16 if bias else None  # about as large as the rounding
    expected = one_by_one(kind, inputs, weight, added)
    if arrange is not None and torch.equal(arrange(weight)(inputs, added), expected):
        return None
    for way in (at_once, batched):
        if torch.equal(way(kind, inputs, weight, added), expected):
            return way
    return one_by_one


# -- models ----------------------------------------------------------------------------------------


def _kind(module: Any) -> Product | None:
    """The product of a linear module with a plain weight; None for other modules."""
    runs = getattr(plain(module, "forward"), "__func__", None)
    kind = {nn.Linear.forward: LINEAR, Conv1D.forward: _conv1d}.get(runs)
    if kind is None or type(module.weight) not in (Tensor, nn.Parameter):
        return None
    return kind


def _modules(model: Any) -> Iterator[Any]:
    """The modules that steps after the prompt run."""
    seen = set()
    for part in (decoder_of(model), model.get_output_embeddings()):
        for module in () if part is None else part.modules():
            if module not in seen:
                seen.add(module)
                yield module


def obstacle(model: Any) -> str | None:
    """What keeps a model's nodes from being computed as if alone; None if nothing is known."""
    text = model.config.get_text_config(decoder=True)
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be exchanged"
    if text._attn_implementation != SDPA:
        return (
            f"attn_implementation={text._attn_implementation!r} cannot run node by node. Load it "
            f"with attn_implementation={SDPA!r}"
        )
    if any(local is not None and local.chunked for local in local_attention(model).values()):
        return "its attention is chunked"
    if getattr(text, "index_topk", None) is not None:
        return "its attention chooses keys by an index"
    for module in _modules(model):
        own = [tensor for tensor in module.parameters(recurse=False) if tensor.ndim > 1]
        known = isinstance(module, nn.Embedding) or _kind(module) is not None
        if (own and not known) or isinstance(module, nn.Linear) and not known:
            return f"its {type(module).__name__} multiplies in a way of its own"
    return None
