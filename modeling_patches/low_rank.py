"""Low-rank changes of linear modules for some tokens, and merged copies of weights."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_spec.modeling_patches.per_call import Changes, plain
from hf_spec.modeling_patches.weights import made_anew, own_share, summed
from hf_spec.threads import cached_property, new_lock

# --------------------------------------------------------------------------------------------------
# Adds low-rank updates to linear modules: y + scale * B(A(x)) (Hu et al., "LoRA", 2021, eq. (3)).
#
# PEFT's LoRA layers replace the modules that they update, and are saved as a PEFT type of their
# own. Here modules are not replaced: a module has a forward hook while its update is attached, or
# is updated only in the forwards of one call. Only a module's input and output are used, so
# quantized linear modules work like plain ones.
#
# Updates can also be merged into the weights of plain modules, and unmerged bit for bit. This
# module knows no adapters or files; the caller provides the factors.

#: Returns the number of tokens of a forward, and how many of the last ones are updated.
Gate = Callable[[], tuple[int, int]]


class Factors(NamedTuple):
    """A low-rank update."""

    down: Tensor  # A, (rank, in_features)
    up: Tensor  # B, (out_features, rank)
    scale: float  # of their product


class LowRank:
    """Low-rank updates of some modules: in all calls while attached, or in those of a `Changes`.

    A model with updates attached can be deep-copied and pickled if `factors` can.

    Args:
        modules: the modules by name.
        factors: `factors(name)` returns the update of a module, or None. It is called in every
            forward of the module, so the update can change over time; gradients flow to the
            factors. They may have another floating-point dtype than the module.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], factors: Callable[[str], Factors | None]
    ) -> None:
        self.modules: dict[str, Any] = dict(modules)
        self.factors = factors
        self._handles: list[Any] = []
        # While merged: the original weights, and a checksum of the merged ones.
        self._originals: dict[str, tuple[Tensor, int]] = {}

    def attach(self) -> None:
        """Update all calls of the modules from now on."""
        if not self._handles:
            self._handles = [
                module.register_forward_hook(_Hook(self, name), with_kwargs=True)
                for name, module in self.modules.items()
            ]

    @property
    def attached(self) -> bool:
        """Whether :meth:`attach` is in effect; merging does not change that."""
        return bool(self._handles)

    def detach(self) -> None:
        """Undo `attach`; merged weights stay merged."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def add_to(self, changes: Changes, gate: Gate | None = None) -> None:
        """Update the modules' calls that run with `changes`.

        Args:
            gate: determines the updated tokens of a forward, called in every forward of a module;
                None for all. Factors are then read once, unless gradients are computed.
        """
        for name, module in self.modules.items():
            hook = _Hook(self, name)
            changes.after(
                module, partial(hook, module) if gate is None else partial(hook.gated, gate)
            )

    @property
    def merged(self) -> bool:
        """Whether the updates are merged into the weights; calls are then not updated."""
        return bool(self._originals)

    @torch.no_grad()
    def merge(self, model: nn.Module, check_finite: bool = False) -> None:
        """Add the updates to the modules' weights, and keep the original ones for `unmerge`.

        Raises:
            ValueError: a module is quantized, offloaded or shares its weight with another one of
                the model, or a result is to be finite and is not. No weight is changed then.
        """
        if self.merged:
            return
        uses = Counter(id(p) for module in model.modules() for p in module.parameters(False))
        for name, module in self.modules.items():
            reason = unmergeable(module)
            if not reason and uses[id(module.weight)] > 1:
                reason = "shares its weight with another module"
            if reason:
                raise ValueError(
                    f"cannot merge into {name}, which {reason}: leave the update unmerged, or load "
                    "the model in bfloat16 or another plain type, in memory."
                )
        for name, module in self.modules.items():
            factors = self.factors(name)
            if factors is None:
                continue
            original, result = module.weight.data, merged(module, factors)
            if check_finite and not bool(result.isfinite().all()):
                self._restore()
                raise ValueError(
                    f"merging gives entries of {name}.weight that are not finite: the update is "
                    "broken, or too large for the weight's type."
                )
            self._originals[name] = (original, _checksum(result))
            module.weight.data = result

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the weights that `merge` has replaced, bit for bit.

        Raises:
            ValueError: weights were changed after the merge, which restoring would undo, too.
        """
        for name, (_, checksum) in self._originals.items():
            if _checksum(self.modules[name].weight.data) != checksum:
                raise ValueError(
                    f"{name}.weight has been changed since the update was merged into it: undo "
                    "that first (another adapter merged later, a cast), or load the model anew."
                )
        self._restore()

    def _restore(self) -> None:
        for name, (original, _) in self._originals.items():
            weight = self.modules[name].weight
            weight.data = original.to(weight.device)
        self._originals = {}


class _Hook:
    """A module's forward hook; a class, as closures cannot be pickled with the model."""

    def __init__(self, owner: LowRank, name: str) -> None:
        self.owner = owner
        self.name = name
        self._factors: Factors | None = None  # where gated, for all steps of a call

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: Any, output: Tensor
    ) -> Tensor | None:
        factors = None if self.owner.merged else self.owner.factors(self.name)
        return None if factors is None else self.updated(args[0], output, factors)

    def updated(self, inputs: Tensor, output: Tensor, factors: Factors) -> Tensor:
        """``output`` (..., out_features) plus the update of ``inputs`` (..., in_features), of which
        either may be this rank's share."""
        module = self.owner.modules[self.name]
        # No-ops unless the model is spread over devices, or the factors have a higher precision.
        down, up = factors.down.to(output.device), factors.up.to(output.device)
        down = own_share(down, inputs.shape[-1], 1, module)
        up = own_share(up, output.shape[-1], 0, module)
        inner = nn.functional.linear(inputs.to(output.device, down.dtype), down)  # (..., rank)
        if down.shape[1] != factors.down.shape[1]:
            inner = summed(inner, module)
        update = nn.functional.linear(inner, up)  # (..., out_features)
        return torch.add(output, update, alpha=factors.scale).to(output.dtype)

    def gated(
        self, gate: Gate, args: tuple[Any, ...], kwargs: Any, output: Tensor
    ) -> Tensor | None:
        """The same for the last tokens of a forward; the others stay bit for bit."""
        tokens, last = gate()
        if not last or last == tokens:
            return self(None, args, kwargs, output) if last else None
        inputs, whole = args[0], output
        if output.ndim == 2:  # some models flatten (batch, tokens, features) before a module
            inputs, whole = (x.unflatten(0, (-1, tokens)) for x in (inputs, output))
        if whole.shape[1] != tokens:
            raise ValueError(
                f"{self.name} sees {whole.shape[1]} tokens of a forward over {tokens}: only "
                "modules that see all tokens in order can be updated in some of them. Leave it out "
                "of target_modules."
            )
        if self._factors is None or torch.is_grad_enabled():
            self._factors = self.owner.factors(self.name)
            if self._factors is not None:
                # On CPUs, products of so few tokens take two to three times as long in bfloat16.
                wide = torch.promote_types(output.dtype, torch.float32)
                place = output.device, wide if output.device.type == "cpu" else output.dtype
                down, up, scale = self._factors
                self._factors = Factors(down.to(*place), up.to(*place), scale)
        if self._factors is not None:
            tail = whole[:, -last:]
            tail.copy_(self.updated(inputs[:, -last:], tail, self._factors))
        return output


# -- weights -------------------------------------------------------------------------------------


def merged(module: Any, factors: Factors) -> Tensor:
    """The weight of ``module`` with the update added."""
    weight = module.weight.data
    precise = torch.promote_types(weight.dtype, torch.float32)
    down, up = (part.to(weight.device, precise) for part in factors[:2])
    update = (up @ down) * factors.scale  # (out_features, in_features)
    if isinstance(module, Conv1D):
        update = update.T
    return (weight.to(precise) + update).to(weight.dtype)


def unmergeable(module: Any) -> str:
    """Why updates cannot be merged into a module; empty if it has a plain weight in memory."""
    if not isinstance(module, (nn.Linear, Conv1D)):
        return f"is a {type(module).__name__}"
    weight = module.weight
    # Quantized parameters are tensor subclasses or integers; sharded ones are DTensors, or
    # DeepSpeed's, which are whole within forwards only.
    plain = type(weight) is nn.Parameter and weight.dtype.is_floating_point
    if not plain or hasattr(weight, "ds_id"):
        return f"is quantized or sharded ({type(weight).__name__} of {weight.dtype})"
    if weight.dtype.itemsize < 2:
        return f"is stored in {weight.dtype}"
    return "has no weight in memory" if weight.is_meta else ""


def _checksum(weight: Tensor) -> int:
    return int(weight.contiguous().view(torch.uint8).sum(dtype=torch.int64))


# -- Lets linear modules compute with copies of their weights, in the forwards of some calls -------


class MergedCopies:
    """Lets modules compute with copies of their weights, W + scale BA, where ``changes`` run.

    The modules keep their weights. If a module has no plain one, as it is quantized, offloaded or
    split over ranks, its output is updated instead. Copies are made when they are first needed; all
    calls share them until a weight or a factor changes or the update is deleted.
    """

    def __init__(self, update: LowRank, changes: Changes) -> None:
        self._update = update
        self._factors: dict[str, Factors] = {}
        for name, module in update.modules.items():
            factors = update.factors(name)
            if factors is not None and _copyable(module, factors):
                self._factors[name] = factors
                changes.instead(module, "forward", partial(self._forward, name))
            else:
                LowRank({name: module}, update.factors).add_to(changes)

    def _forward(self, name: str, inputs: Tensor) -> Tensor:
        module, weight = self._update.modules[name], self.weights[name]
        weight = weight.T if isinstance(module, Conv1D) else weight
        return nn.functional.linear(inputs, weight, module.bias)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The copies by name of module, in the shape of the originals."""
        modules = {name: self._update.modules[name] for name in self._factors}
        parts = [part for factors in self._factors.values() for part in factors[:2]]
        sources = [*(module.weight for module in modules.values()), *parts]

        def make() -> dict[str, Tensor]:
            return {name: merged(modules[name], fac) for name, fac in self._factors.items()}

        with _COPYING:
            return made_anew(_COPIES, self._update, sources, make)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies; 0 while they are not needed."""
        made: dict[str, Tensor] = vars(self).get("weights", {})
        return sum(weight.nbytes for weight in made.values())


#: The copies of each update. They are not an attribute of it, so models are copied and pickled
#: without them.
_COPIES: WeakKeyDictionary[LowRank, Any] = WeakKeyDictionary()
_COPYING = new_lock()


def _copyable(module: Any, factors: Factors) -> bool:
    """Whether a module only multiplies with a plain weight that is not split."""
    runs = getattr(plain(module, "forward"), "__func__", None)
    shape = factors.up.shape[0], factors.down.shape[1]
    if isinstance(module, Conv1D):
        shape = shape[::-1]
    return (
        runs in (nn.Linear.forward, Conv1D.forward)
        and not unmergeable(module)
        and tuple(module.weight.shape) == shape
    )
