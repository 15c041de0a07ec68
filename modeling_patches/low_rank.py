"""Adds low-rank updates to linear modules: y + scale * B(A(x)) (Hu et al., "LoRA", 2021, eq. (3)).

PEFT's LoRA layers replace the modules that they update, and are saved as a PEFT type of their own.
Here modules are not replaced: a module has a forward hook while its update is attached, or is
updated only in the forwards of one call. Only a module's input and output are used, so quantised
linear modules work like plain ones.

Updates can also be merged into the weights of plain modules, and unmerged bit for bit; or merged
into copies of these weights, for the forwards of some calls (`MergedCopies`). This module knows no
adapters or files; the caller provides the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modeling_patches.merging import Factors, bit_sum, check_mergeable, merged
from modeling_patches.per_call import Changes
from modeling_patches.ranks import own_share, summed

#: Returns the number of tokens of a forward, and how many of the last ones are updated.
Gate = Callable[[], tuple[int, int]]


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
        # While merged: the original weights, and a sum over the bits of the merged ones.
        self._originals: dict[str, tuple[Tensor, int]] = {}

    def attach(self) -> None:
        """Update all calls of the modules from now on."""
        if not self._handles:
            self._handles = [
                module.register_forward_hook(_Hook(self, name))
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
            changes: the changes that this is added to.
            gate: determines the updated tokens of a forward, called in every forward of a module;
                None for all.
        """
        for name, module in self.modules.items():
            hook = _Hook(self, name)
            changes.after(module, hook.within_call if gate is None else _Gated(hook, gate))

    # -- merging -----------------------------------------------------------------------------------

    @property
    def merged(self) -> bool:
        """Whether the updates are merged into the weights; calls are then not updated."""
        return bool(self._originals)

    @torch.no_grad()
    def merge(self, model: nn.Module, check_finite: bool = False) -> None:
        """Add the updates to the modules' weights, and keep the original ones for `unmerge`.

        Args:
            model: the model that the modules belong to.
            check_finite: whether to refuse results that are not finite.

        Raises:
            ValueError: a module is quantised, offloaded or shares its weight with another one, or a
                result is not finite. No weight is changed then.
        """
        if self.merged:
            return
        check_mergeable(model, self.modules)
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
            self._originals[name] = (original, bit_sum(result))
            module.weight.data = result

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the weights that `merge` has replaced, bit for bit.

        Raises:
            ValueError: weights were changed after the merge, which restoring would undo, too.
        """
        for name, (_, bits) in self._originals.items():
            if bit_sum(self.modules[name].weight.data) != bits:
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

    def within_call(self, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> Tensor | None:
        return self(None, args, output)

    def __call__(self, module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        owner = self.owner
        if owner.merged:
            return None
        factors = owner.factors(self.name)
        if factors is None:
            return None
        return _updated(args[0], output, *factors, self.owner.modules[self.name])


class _Gated:
    """A module's hook that updates the last tokens of a forward; the others stay bit for bit."""

    def __init__(self, hook: _Hook, gate: Gate) -> None:
        self.hook, self.gate = hook, gate
        #: A and B as the computation takes them, cached for all steps of a call.
        self._ready: tuple[Tensor, Tensor] | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> Tensor | None:
        rows, last = self.gate()
        if not last:
            return None
        inputs = args[0]
        if last == rows:
            return self.hook(None, args, output)
        whole = output
        if output.ndim == 2:  # some models flatten (batch, tokens, features) before a module
            inputs, whole = (x.unflatten(0, (-1, rows)) for x in (inputs, output))
        if whole.shape[1] != rows:
            raise ValueError(
                f"{self.hook.name} sees {whole.shape[1]} rows of a forward over {rows}: only "
                "modules that see all rows in order can be updated in some of them. Leave it out "
                "of target_modules."
            )
        inputs, tail = inputs[:, -last:], whole[:, -last:]
        if self._ready is None:
            self._ready = self._prepared(inputs, output)
        if self._ready is None:  # the module is split over ranks, or gradients are needed
            updated = self.hook(None, (inputs,), tail)
            if updated is not None:
                tail.copy_(updated)
            return output
        down, up = self._ready
        inner = inputs.to(down.dtype) @ down
        if not inner.dtype == up.dtype == output.dtype:  # autocast may have cast the inner one
            tail.add_(inner @ up)
        elif len(tail) == 1:
            tail[0].addmm_(inner[0], up)
        else:
            tail.baddbmm_(inner, up.expand(len(tail), -1, -1))
        return output

    def _prepared(self, inputs: Tensor, output: Tensor) -> tuple[Tensor, Tensor] | None:
        factors = self.hook.owner.factors(self.hook.name)
        if factors is None or torch.is_grad_enabled():
            return None
        down, up, scale = factors
        if (inputs.shape[-1], output.shape[-1]) != (down.shape[1], up.shape[0]):
            return None
        dtype = output.dtype
        if output.device.type == "cpu":
            # Products of so few rows take two to three times as long in bfloat16 as in float32.
            dtype = torch.promote_types(dtype, torch.float32)
        return down.T.to(output.device, dtype), (up.T * scale).to(output.device, dtype)


def _updated(
    inputs: Tensor, output: Tensor, down: Tensor, up: Tensor, scale: float, module: nn.Module
) -> Tensor:
    """``output`` (..., out_features) plus the update of ``inputs`` (..., in_features).

    If a module is split (tensor parallelism), either may be this rank's share.
    """
    # No-ops unless the model is spread over devices, or the factors have a higher precision.
    down, up = down.to(output.device), up.to(output.device)
    whole = down.shape[1]
    down = own_share(down, inputs.shape[-1], 1, module)
    up = own_share(up, output.shape[-1], 0, module)
    inner = nn.functional.linear(inputs.to(output.device, down.dtype), down)  # (..., rank)
    if inputs.shape[-1] != whole:
        inner = summed(inner, module)
    update = nn.functional.linear(inner, up)  # (..., out_features)
    return torch.add(output, update, alpha=scale).to(output.dtype)
