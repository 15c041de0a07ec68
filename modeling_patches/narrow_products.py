"""Products of few tokens and a large weight, by the fastest of several ways.

The forwards of speculative decoding have few tokens: more than the one that a plain step has, fewer
than a prompt. For these, the matrix products of CPU libraries can be far from optimal: in float32,
``x W^T`` may take twice as long as ``(W x^T)^T``, which is the same sums, and that may be faster
with more tokens, which fill a block. What is fastest depends on library, processor, threads and
shape. So the first products of a shape are timed, and the process keeps to the fastest way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from transformers.pytorch_utils import Conv1D

from modeling_patches.per_call import Changes, plain

#: From inputs (rows, in_features), a weight and a bias to outputs (rows, out_features).
Way = Callable[[Tensor, Tensor, Tensor | None], Tensor]

#: Largest number of tokens.
MOST = 64
#: Smallest number of entries of a weight; products of smaller ones are mostly overhead.
LEAST = 2**16
#: Number of tokens that fill a block of a matrix product.
BLOCK = 16
#: Timed products of each way.
SAMPLES = 3
#: ``(W x^T)^T`` is kept if no other way is faster by more than this factor. Near ties are then
#: decided alike in all processes, which thus compile the same code and find it in a cache on disk.
MARGIN = 1.1


def _stock(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(inputs, weight, bias)


def _transposed(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result = torch.mm(weight, inputs.t()).t().contiguous()
    return result if bias is None else result.add_(bias)


def _filled(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = len(inputs)
    inputs = functional.pad(inputs, (0, 0, 0, -rows % BLOCK))
    result = torch.mm(weight, inputs.t())[:, :rows].t().contiguous()
    return result if bias is None else result.add_(bias)


class _Race:
    """The ways to multiply ``rows`` tokens and weights of one shape.

    Attributes:
        seconds: times of each way.
        fastest: the one that is kept; None before that.
    """

    def __init__(self, rows: int) -> None:
        ways = [_stock, _transposed]
        if rows % BLOCK > BLOCK // 2:
            ways.append(_filled)
        self.seconds: dict[Way, list[float]] = {way: [] for way in ways}
        self.fastest: Way | None = None

    def run(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product, timed if that is still needed."""
        if self.fastest is not None:
            return self.fastest(inputs, weight, bias)
        way = min(self.seconds, key=lambda way: len(self.seconds[way]))
        start = perf_counter()
        result = way(inputs, weight, bias)
        self.seconds[way].append(perf_counter() - start)
        if all(len(each) >= SAMPLES for each in self.seconds.values()):
            self.fastest = min(self.seconds, key=self._cost)
        return result

    def _cost(self, way: Way) -> float:
        return min(self.seconds[way]) * (1.0 if way is _transposed else MARGIN)

    def decide(self, rows: int, weight: Tensor) -> None:
        """Time what has not been timed yet, outside a capture."""
        with _disable_current_modes(), torch.no_grad():
            inputs = weight.new_zeros(rows, weight.shape[1])
            while self.fastest is None:
                self.run(inputs, weight)


_RACES: dict[Hashable, _Race] = {}


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``functional.linear`` by the fastest way.

    That is the stock way, without timing, unless the weight is a plain float32 tensor on a CPU, the
    number of tokens is from 2 to :data:`MOST`, and neither autocast, gradients nor other processes,
    which would have to choose the same way, are involved.

    Args:
        inputs: ``(..., in_features)``.
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)``.
    """
    rows = inputs.numel() // max(inputs.shape[-1], 1)
    if not 1 < rows <= MOST or not _concerned(weight) or inputs.dtype != weight.dtype:
        return functional.linear(inputs, weight, bias)
    captured = isinstance(inputs, FakeTensor)
    if captured and torch._inductor.config.freezing:  # the compiler arranges weights for its own
        return functional.linear(inputs, weight, bias)
    key = weight.shape, weight.stride(), rows, torch.get_num_threads()
    race = _RACES.get(key) or _RACES.setdefault(key, _Race(rows))
    if captured and race.fastest is None:
        race.decide(rows, weight)
    result = race.run(inputs.reshape(rows, inputs.shape[-1]), weight, bias)
    return result.view(*inputs.shape[:-1], -1)


def narrow_products(model: nn.Module, changes: Changes) -> None:
    """Let the linear modules of a model compute their outputs by :func:`product`."""
    for module in model.modules():
        own = getattr(plain(module, "forward"), "__func__", None)  # not that of a wrapper
        if type(module) in _FORWARDS and own is type(module).forward and _concerned(module.weight):
            changes.instead(module, "forward", partial(_FORWARDS[type(module)], module))


def _linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    return product(inputs, module.weight, module.bias)


def _conv1d(module: Conv1D, x: Tensor) -> Tensor:
    return product(x, module.weight.T, module.bias)


_FORWARDS: dict[type, Callable[..., Tensor]] = {nn.Linear: _linear, Conv1D: _conv1d}


def _concerned(weight: Any) -> bool:
    """Whether products with a weight have a choice."""
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= LEAST
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not (distributed.is_available() and distributed.is_initialized())
    )
