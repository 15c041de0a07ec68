"""Weights arranged as oneDNN's products read them fastest, beside the model's own.

PyTorch's product of several tokens with a weight arranges it anew each time. A packed copy costs
its memory once. Its products may round differently, as those of another number of tokens do.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_spec.core.memory import locked, memory
from hf_spec.model.cpu_dtypes import has_instructions
from modeling_patches.bitwise import Arranged
from modeling_patches.contents import contents
from modeling_patches.per_call import Changes, plain

#: Elements from which a weight is packed: for smaller ones, calling oneDNN costs what is gained. In
#: bfloat16, PyTorch's own product calls it, too.
SMALLEST = {torch.bfloat16: 2**18, torch.float16: 2**19, torch.float32: 2**19}
#: Least tokens of a product, those of all rows: with fewer, PyTorch's own is as fast.
LEAST_TOKENS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 2}
#: Most tokens of a product.
MOST_TOKENS = 64
#: Share of the free memory that copies take unasked.
MOST_OF_MEMORY = 0.25
#: Number of tokens that weights are arranged for.
_TOKENS = 8
#: Where a model's copies are kept.
_KEPT = "packed weights"


class _Copy:
    """The packed copy of a weight, which it keeps alive."""

    def __init__(self, weight: Tensor):
        self.weight = weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _TOKENS)

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """``(..., features)`` to ``(..., outputs)``."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self._packed, bias, "none", [], ""
        )
        return output


def packed_product(weight: Tensor) -> Arranged:
    """The product with a packed copy of a weight."""
    return _Copy(weight).product


#: All copies by their weights' addresses, for compiled code.
_COPIES: WeakValueDictionary[int, _Copy] = WeakValueDictionary()


class PackedWeights:
    """Packed copies of linear modules' weights.

    Args:
        linears: modules that are :func:`packable`.

    Attributes:
        packed: the contents of the weights that were packed.
    """

    def __init__(self, linears: list[nn.Linear]):
        self.linears = linears
        self.packed = contents([linear.weight for linear in linears])
        self._copies: dict[int, _Copy] = {}
        for linear in linears:  # some may share their weight
            place = linear.weight.data_ptr()
            if place not in self._copies:
                _COPIES[place] = self._copies[place] = _Copy(linear.weight)

    @property
    def products(self) -> dict[nn.Module, Arranged]:
        """Each module's product with its copy."""
        return {linear: self._copies[linear.weight.data_ptr()].product for linear in self.linears}

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(copy.weight.nbytes for copy in self._copies.values())

    def add_to(self, changes: Changes) -> None:
        """Let the modules compute with the copies within ``changes``."""
        for linear in self.linears:
            copy = self._copies[linear.weight.data_ptr()]
            changes.instead(linear, "forward", partial(_product, linear, copy))


@locked
def packed_weights(model: nn.Module, unasked: bool = False) -> PackedWeights | None:
    """The packed copies of a model's large weights, made anew if these have changed.

    Args:
        unasked: make them only where they are known to pay and memory is plentiful: in float32 and
            bfloat16, in at most `MOST_OF_MEMORY` of what is free.

    Returns:
        None if there are none that oneDNN packs on this machine.
    """
    kept, linears = memory(model), [module for module in model.modules() if packable(module)]
    found: PackedWeights | None = kept.get(_KEPT)
    if unasked and not (linears and _pays(linears) and (found or _fits(linears))):
        return None
    now = contents([linear.weight for linear in linears])
    if found is None or found.linears != linears or found.packed != now:
        kept[_KEPT] = found = None  # frees the memory first
        if linears:
            kept[_KEPT] = found = PackedWeights(linears)
    return found


def packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is linear, with a weight that oneDNN can pack and that is worth it."""
    if type(module) is not nn.Linear or not torch.backends.mkldnn.is_available():
        return False
    weight = module.weight
    plain_tensor = type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided
    if not plain_tensor or weight.device.type != "cpu" or weight.dtype not in SMALLEST:
        return False
    if weight.numel() < SMALLEST[weight.dtype]:
        return False
    return weight.dtype == torch.float32 or has_instructions(weight.dtype) is True


def _pays(linears: list[nn.Linear]) -> bool:
    fast = torch.backends.cpu.get_cpu_capability().startswith("AVX")  # where it was measured
    return fast and all(linear.weight.dtype != torch.float16 for linear in linears)


def _fits(linears: list[nn.Linear]) -> bool:
    each = {linear.weight.data_ptr(): linear.weight.nbytes for linear in linears}
    return sum(each.values()) <= MOST_OF_MEMORY * psutil.virtual_memory().available


def _product(linear: nn.Linear, copy: _Copy, inputs: Tensor) -> Any:
    """A linear module's output, by the packed copy of its weight where that is faster."""
    tokens = inputs.numel() // inputs.shape[-1]
    casts = torch.is_autocast_enabled("cpu") or inputs.dtype != linear.weight.dtype
    few = LEAST_TOKENS[linear.weight.dtype] <= tokens <= MOST_TOKENS
    if not few or casts or torch.is_grad_enabled():
        return plain(linear, "forward")(inputs)
    if isinstance(inputs, FakeTensor):  # a packed tensor cannot be in captured code
        return torch.ops.hf_spec.packed_linear(inputs, linear.weight, linear.bias)
    return copy.product(inputs, linear.bias)


def _packed_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    copy = _COPIES.get(weight.data_ptr())
    return (
        nn.functional.linear(inputs, weight, bias) if copy is None else copy.product(inputs, bias)
    )


_OPERATORS = torch.library.Library("hf_spec", "DEF")
_OPERATORS.define("packed_linear(Tensor inputs, Tensor weight, Tensor? bias) -> Tensor")
_OPERATORS.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake(
    "hf_spec::packed_linear",
    lambda inputs, weight, bias: inputs.new_empty((*inputs.shape[:-1], weight.shape[0])),
    lib=_OPERATORS,
)
