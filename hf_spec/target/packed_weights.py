"""Weights that a CPU's matrix units read faster, and what these can do."""

import functools
import logging
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary, WeakValueDictionary

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_spec.core.checks import check_switch
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.per_call import Changes, own_function, plain
from hf_spec.modeling_patches.weights import made_anew, placement
from hf_spec.threads import locked, memory

# -- Whether a CPU has instructions for the dtype that a model computes in -------------------------

logger = logging.getLogger(__name__)

#: Operators that say whether oneDNN has products in a dtype on this CPU.
_SUPPORTED = {
    "torch.bfloat16": "_is_mkldnn_bf16_supported", "torch.float16": "_is_mkldnn_fp16_supported",
}  # fmt: skip


def has_instructions(dtype: torch.dtype) -> bool | None:
    """Whether the CPU multiplies in this 16-bit dtype; None where this PyTorch does not say."""
    supported = getattr(torch.ops.mkldnn, _SUPPORTED[str(dtype)], None)
    if supported is None or not torch.backends.mkldnn.is_available():
        return None
    return bool(supported())


def warn_if_slow(model: Any, cache: Any = None) -> None:
    """Log a warning, once per dtype, if a model computes in one that its CPU has no instructions
    for.

    Args:
        cache: what its forward has made. Autocast within the forward shows in its values only.
    """
    at = placement(model)
    if at.device.type != "cpu" or getattr(model, "is_quantized", False):
        return
    values = (getattr(layer, "values", None) for layer in getattr(cache, "layers", ()))
    dtype = next((one.dtype for one in values if one is not None), at.dtype)
    remedy = "load the model with dtype=torch.float32"
    if dtype != at.dtype:
        remedy = "the model is in another, so turn autocast off (Trainer, TRL: bf16=False)"
    _warn(dtype, remedy)


@functools.cache
def _warn(dtype: torch.dtype, remedy: str) -> None:
    if str(dtype) in _SUPPORTED and has_instructions(dtype) is False:
        logger.warning(
            f"This CPU has no instructions for {str(dtype).removeprefix('torch.')}, in which steps "
            f"of several tokens take several times as long as in float32: {remedy}."
        )


# -- Weights arranged as oneDNN's products read them fastest, beside the model's own ---------------
#
# PyTorch's product of several tokens with a weight arranges it anew each time. A packed copy costs
# its memory once. Its products may round differently, as those of another number of tokens do.
#
# A model's memory says that it is packed. Each call of a strategy computes with the copies, after a
# look at the weights (:mod:`hf_spec.modeling_patches.weights`); nothing on the model changes.

#: Names of modules that read the same input: one product with all their weights takes less time
#: than one with each.
TOGETHER = ("q_proj", "k_proj", "v_proj")
#: Elements from which weights are packed: for smaller ones, calling oneDNN costs what is gained. In
#: bfloat16, PyTorch's own product calls it, too.
SMALLEST = {torch.bfloat16: 2**18, torch.float16: 2**19, torch.float32: 2**19}
#: Least tokens of a product, those of all rows: with fewer, PyTorch's own is as fast.
LEAST_TOKENS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 2}
#: Most tokens of a product: with more, arranging the weight hardly counts. PyTorch's own in float32
#: is by another library, which is slower with any number of tokens on CPUs of AMD.
MOST_TOKENS = {torch.bfloat16: 256, torch.float16: 64, torch.float32: 1024}
#: Number of tokens that weights are arranged for.
_TOKENS = 8


class _Copy:
    """The packed copy of weights that multiply the same inputs; it keeps them alive."""

    def __init__(self, *weights: Tensor):
        self.weights = [weight.detach() for weight in weights]
        whole = _joined(self.weights)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, _TOKENS)

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """``(..., features)`` to ``(..., outputs)``, those of all weights one after the other."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self._packed, bias, "none", [], "")


#: All copies by their weights' addresses, for compiled code.
_COPIES: WeakValueDictionary[tuple[int, ...], _Copy] = WeakValueDictionary()


class PackedWeights:
    """Packed copies of linear modules' weights.

    Args:
        groups: modules that are :func:`packable`; those of a group have one copy.
    """

    def __init__(self, groups: list[list[nn.Linear]]):
        self.groups = groups
        self._copies: dict[tuple[int, ...], _Copy] = {}
        for group in groups:  # some may share their weights
            place = _place(group)
            if place not in self._copies:
                weights = [linear.weight for linear in group]
                _COPIES[place] = self._copies[place] = _Copy(*weights)

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(weight.nbytes for copy in self._copies.values() for weight in copy.weights)

    def add_to(self, changes: Changes) -> None:
        """Let the modules compute with the copies within ``changes``."""
        for group in self.groups:
            together = _Together(group, self._copies[_place(group)])
            for linear in group:
                changes.instead(linear, "forward", partial(together, linear))


class _Together:
    """The modules of a copy in one call: the first that gets an input computes for all."""

    def __init__(self, linears: list[nn.Linear], copy: _Copy):
        self._linears, self._copy = linears, copy
        self._biases = [linear.bias for linear in linears if linear.bias is not None]
        self._sizes = [linear.out_features for linear in linears]
        self._inputs: tuple[Tensor | None, int | None] = None, None
        self._ready: dict[nn.Linear, Tensor] = {}

    def __call__(self, linear: nn.Linear, inputs: Tensor) -> Any:
        """A module's output, by the packed copy where that is faster."""
        # Inputs may be changed in place in between.
        given = inputs, None if inputs.is_inference() else inputs._version
        if given[0] is self._inputs[0] and given[1] == self._inputs[1] and linear in self._ready:
            return self._ready.pop(linear)
        tokens, dtype = inputs.numel() // inputs.shape[-1], linear.weight.dtype
        casts = torch.is_autocast_enabled("cpu") or inputs.dtype != dtype
        few = LEAST_TOKENS[dtype] <= tokens <= MOST_TOKENS[dtype]
        if not few or casts or torch.is_grad_enabled():
            return plain(linear, "forward")(inputs)
        if isinstance(inputs, FakeTensor):  # a packed tensor cannot be in captured code
            weights = [one.weight for one in self._linears]
            outputs = torch.ops.hf_spec.packed_linear(inputs, weights, self._biases)
        else:
            outputs = self._copy.product(inputs, _joined(self._biases))
        if len(self._linears) == 1:
            return outputs
        self._inputs = given
        self._ready = dict(zip(self._linears, outputs.split(self._sizes, dim=-1)))
        return self._ready.pop(linear)


@locked
def pack_weights(model: nn.Module, pack: bool = True) -> int:
    """Let strategies compute with packed copies of a model's large weights from now on.

    On a CPU, products of few tokens are faster with weights that oneDNN has arranged. Every later
    call with a strategy uses the copies for the prompt, steps and drafts; an assistant model and
    the layers of ``mtp`` get theirs at the first call. Plain generation and other forwards use the
    model's own weights. Where these have changed, a call makes the copies anew; only single
    entries that were written through ``.data`` may go unnoticed. A copied or reloaded model is not
    packed, nor a layer whose ``forward`` somebody has replaced.

    Args:
        model: a causal language model or a `PeftModel`.
        pack: False frees the copies and undoes this.

    Returns:
        Memory of the copies, in bytes; it is taken beside that of the weights.

    Raises:
        ValueError: oneDNN packs none of the model's weights on this machine, or ``pack`` is neither
            True nor False.
    """
    check_switch("pack", pack)
    model = unwrapped(model)
    if not pack:
        memory(model).pop(PackedWeights, None)
        return 0
    if not _groups(model):
        raise ValueError(
            f"pack_weights: oneDNN packs none of the weights of this {type(model).__name__}. It "
            f"packs linear layers with {min(SMALLEST.values()):,} weights or more on a CPU, in "
            "bfloat16 and float16 if the CPU has instructions for them; in float32 larger ones. "
            "Leave the call out."
        )
    memory(model).setdefault(PackedWeights, WeakKeyDictionary())
    return sum(one.num_bytes for one in packed_weights(model))


def pack_where_it_pays(model: nn.Module) -> None:
    """:func:`pack_weights`, as the command line does it: where it is known to pay, with AVX in
    float32 and bfloat16, if the copies fit into a quarter of the free memory."""
    weights = [linear.weight for linear in chain.from_iterable(_groups(model))]
    room = psutil.virtual_memory().available / 4 - sum(weight.nbytes for weight in weights)
    pays = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    pays = pays and all(weight.dtype != torch.float16 for weight in weights)
    if weights and pays and room >= 0:
        pack_weights(model)


@locked
def packed_weights(model: nn.Module, *beside: nn.Module) -> list[PackedWeights]:
    """The copies that a call computes with, made anew where weights have changed.

    Args:
        beside: modules that run beside the model; they are packed if the model or they are.
    """
    own, found = memory(model).get(PackedWeights), []
    for module in (model, *beside):
        kept = memory(module).get(PackedWeights, own)
        if kept is None:
            continue
        groups = _groups(module)
        weights = [linear.weight for linear in chain.from_iterable(groups)]
        copies = made_anew(kept, module, weights, partial(PackedWeights, groups), groups)
        if groups:  # there may be none any more, on another device
            found.append(copies)
    return found


def _groups(model: nn.Module) -> list[list[nn.Linear]]:
    """The modules whose weights are packed, by the copy that they share."""
    groups: list[list[nn.Linear]] = []
    seen: set[nn.Module] = set()  # some have several parents
    for parent in model.modules():
        known = {name: one for name, one in parent.named_children() if one not in seen}
        children = {name: one for name, one in known.items() if packable(one)}
        seen |= set(children.values())
        group = [children[name] for name in TOGETHER if name in children]
        kinds = {(one.in_features, one.weight.dtype, one.bias is None) for one in group}
        if len(group) == len(TOGETHER) and len(kinds) == 1:
            groups.append(group)
            children = {name: one for name, one in children.items() if name not in TOGETHER}
        groups += [[one] for one in children.values()]
    return [
        group for group in groups
        if sum(one.weight.numel() for one in group) >= SMALLEST[group[0].weight.dtype]
    ]  # fmt: skip


def packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module only multiplies with a weight, and oneDNN can pack it."""
    if type(module) is not nn.Linear or not torch.backends.mkldnn.is_available():
        return False
    own = own_function(module, "forward")  # of somebody who has replaced it; hooks run anyway
    if own is not None and getattr(own, "__func__", None) is not nn.Linear.forward:
        return False
    weight = module.weight
    plain_tensor = type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided
    if not plain_tensor or weight.device.type != "cpu" or weight.dtype not in SMALLEST:
        return False
    return weight.dtype == torch.float32 or has_instructions(weight.dtype) is True


def _place(group: list[nn.Linear]) -> tuple[int, ...]:
    return tuple(linear.weight.data_ptr() for linear in group)


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0] if parts else None


def packed_linear(inputs: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """What the operator ``hf_spec::packed_linear`` computes."""
    copy = _COPIES.get(tuple(weight.data_ptr() for weight in weights))
    if copy is None:
        return nn.functional.linear(inputs, torch.cat(weights), _joined(biases))
    return copy.product(inputs, _joined(biases))


def _shape_of_packed_linear(
    inputs: Tensor, weights: list[Tensor], biases: list[Tensor]
) -> Tensor:  # fmt: skip
    return inputs.new_empty((*inputs.shape[:-1], sum(len(weight) for weight in weights)))


def _packed_linear(inputs: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    # An operator can be defined once; the module that has the copies may have been loaded again.
    from hf_spec.target import packed_weights

    return packed_weights.packed_linear(inputs, weights, biases)


if not hasattr(torch.ops.hf_spec, "packed_linear"):
    _OPERATORS = torch.library.Library("hf_spec", "FRAGMENT")
    _OPERATORS.define("packed_linear(Tensor inputs, Tensor[] weights, Tensor[] biases) -> Tensor")
    _OPERATORS.impl("packed_linear", _packed_linear, "CPU")
    torch.library.register_fake("hf_spec::packed_linear", _shape_of_packed_linear, lib=_OPERATORS)
