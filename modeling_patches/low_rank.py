"""Adds low-rank updates to linear modules: y + scale * B(A(x)) (Hu et al., "LoRA", 2021, eq. (3)).

PEFT's LoRA layers replace the modules that they update, and are saved as a PEFT type of their own.
Here modules are not replaced: a module has a forward hook while its update is attached, or is
updated only in the forwards of one call. Only a module's input and output are used, so quantised
linear modules work like plain ones.

Updates can also be merged into the weights of plain modules, and unmerged bit for bit; or merged
into copies of these weights, for the forwards of some calls (`MergedCopies`). This module knows no
adapters or files; the caller provides the factors.
"""

import inspect
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import regex
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from modeling_patches.contents import contents
from modeling_patches.layer_skip import decoder_layers, sublayers
from modeling_patches.per_call import Changes, plain
from modeling_patches.ranks import own_share, summed
from modeling_patches.weights import features, in_use

#: PEFT's name for the linear modules of all decoder layers.
ALL_LINEAR = "all-linear"
#: Integers as wide as the entries of a weight, to compare bits.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Most characters of a pattern of names, and most seconds for matching all names of a model.
PATTERN_LENGTH, PATTERN_SECONDS = 1000, 2.0

Targets = str | Sequence[str] | None
#: Returns the number of tokens of a forward, and how many of the last ones are updated.
Gate = Callable[[], tuple[int, int]]


class Factors(NamedTuple):
    """A low-rank update.

    Attributes:
        down: A, ``(rank, in_features)``.
        up: B, ``(out_features, rank)``.
        scale: factor of their product.
    """

    down: Tensor
    up: Tensor
    scale: float


def linear_modules(model: nn.Module, targets: Targets = None) -> dict[str, nn.Module]:
    """Linear modules of a causal language model, by name.

    A module that PEFT has wrapped is found inside the wrapper, under its original name.

    Args:
        model: the model itself, not a `PeftModel` around it.
        targets: the modules to find, like PEFT's `target_modules`: a list of names, or of ends of
            names after a dot; or a regular expression that matches whole names. None and
            "all-linear" stand for all linear modules inside the decoder layers.

    Raises:
        ValueError: nothing matches, a name in the list matches nothing, or the regular expression
            is invalid or takes too long.
    """
    everything = {name: m for name, m in _walk(model) if _is_linear(m)}
    if targets is None or targets == ALL_LINEAR:
        inside = {id(module) for module in decoder_layers(model).modules()}
        found = {name: module for name, module in everything.items() if id(module) in inside}
        unmatched = [] if found else ["the decoder layers"]
    elif isinstance(targets, str):
        found = _matching(targets, everything)
        unmatched = [] if found else [targets]
    else:
        ends = {end: [name for name in everything if _ends(name, end)] for end in targets}
        matched = {name for names in ends.values() for name in names}
        found = {name: module for name, module in everything.items() if name in matched}
        unmatched = [end for end, names in ends.items() if not names] or ([] if found else [""])
    if unmatched:
        last = sorted({name.rpartition(".")[2] for name in everything})
        raise ValueError(
            f"no linear module of {type(model).__name__} matches "
            f"{', '.join(map(repr, unmatched))}: name linear modules, such as "
            f"{', '.join(last[:8]) or 'none here'}, or give a regular expression for whole "
            "names."
        )
    return found


def output_projections(model: nn.Module) -> dict[str, nn.Module]:
    """The last linear module of each decoder layer, which writes to the residual stream.

    That of its MLP; of its attention where the MLP has none, as with routed experts.

    Args:
        model: a causal language model.

    Returns:
        The modules by name.

    Raises:
        ValueError: there is none.
    """
    hidden = model.config.get_text_config(decoder=True).hidden_size  # type: ignore[union-attr, operator]
    names = {id(module): name for name, module in _walk(model)}
    found: dict[str, nn.Module] = {}
    for layer in decoder_layers(model):
        inside = [
            module
            for parts in sublayers(layer)  # attention comes first
            for part in parts
            for _, module in _walk(part)
            if _is_linear(module) and (features(module) or (0, 0))[1] == hidden
        ]
        found |= {names[id(module)]: module for module in inside[-1:]}
    if not found:
        raise ValueError(
            f"no linear module of {type(model).__name__} is the last of an attention or an MLP: "
            "name them in target_modules."
        )
    return found


def compiled(pattern: str) -> regex.Pattern[str]:
    """Compile a regular expression of module names.

    Raises:
        ValueError: it is invalid or too long.
    """
    shown = repr(pattern if len(pattern) <= 80 else f"{pattern[:77]}...")
    if len(pattern) > PATTERN_LENGTH:
        raise ValueError(
            f"the pattern {shown} has {len(pattern)} characters: at most {PATTERN_LENGTH} are "
            "tried. Give a list of names."
        )
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"{shown} is no regular expression: {error}.") from error


def _matching(pattern: str, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules whose whole names match.

    This uses the package `regex`: some patterns take exponential time, and `re` has no timeout.
    """
    expression, end = compiled(pattern), time.monotonic() + PATTERN_SECONDS
    try:
        return {
            name: module
            for name, module in modules.items()
            if expression.fullmatch(name, timeout=max(end - time.monotonic(), 1e-3))
        }
    except TimeoutError as error:
        raise ValueError(
            f"the pattern {pattern!r} takes longer than {PATTERN_SECONDS:g} seconds to match the "
            "names of the model's modules: simplify it, or give a list of names."
        ) from error


def _is_linear(module: nn.Module) -> bool:
    """Whether a module has features and returns only their product; routers of experts return
    more."""
    returns = str(inspect.signature(type(module).forward).return_annotation)
    return features(module) is not None and "tuple" not in returns.lower()


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _walk(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules with their names; a PEFT wrapper is replaced by the module that it wraps."""
    module = in_use(module)
    yield name, module
    for child_name, child in module.named_children():
        yield from _walk(child, f"{name}.{child_name}" if name else child_name)


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
        shared = _shared_weights(model)
        for name, module in self.modules.items():
            _check_mergeable(name, module, shared)
        for name, module in self.modules.items():
            factors = self.factors(name)
            if factors is None:
                continue
            original, result = module.weight.data, _merged(module, factors)
            if check_finite and not bool(result.isfinite().all()):
                self._restore()
                raise ValueError(
                    f"merging gives entries of {name}.weight that are not finite: the update is "
                    "broken, or too large for the weight's type."
                )
            self._originals[name] = (original, _bit_sum(result))
            module.weight.data = result

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the weights that `merge` has replaced, bit for bit.

        Raises:
            ValueError: weights were changed after the merge, which restoring would undo, too.
        """
        for name, (_, bits) in self._originals.items():
            if _bit_sum(self.modules[name].weight.data) != bits:
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


class MergedCopies:
    """Lets modules compute with copies of their weights, W + scale BA, where ``changes`` run.

    The modules keep their weights. If a module has no plain one, as it is quantised, offloaded or
    split over ranks, its output is updated instead. Copies are made when they are first needed; all
    calls share them until a weight or a factor changes or the update is deleted.

    Args:
        update: the update.
        changes: the changes that this is added to.
    """

    def __init__(self, update: LowRank, changes: Changes) -> None:
        self._update = update
        self._factors: dict[str, Factors] = {}
        for name, module in update.modules.items():
            factors = update.factors(name)
            if factors is not None and _copyable(module, factors):
                self._factors[name] = factors
                changes.instead(module, "forward", _Forward(self, name, module))
            else:
                changes.after(module, _Hook(update, name).within_call)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The copies by name of module, in the shape of the originals."""
        modules = {name: self._update.modules[name] for name in self._factors}
        factors = [part for one in self._factors.values() for part in (one.down, one.up)]
        with _COPYING, torch.inference_mode(False), torch.no_grad():
            made_of = contents([*(module.weight for module in modules.values()), *factors])
            kept = _COPIES.get(self._update)
            if kept is not None and kept[0] == made_of:
                return kept[1]
            _COPIES.pop(self._update, None)  # frees them before new ones are allocated
            del kept
            copies = {name: _merged(modules[name], factors)
                      for name, factors in self._factors.items()}  # fmt: skip
            _COPIES[self._update] = made_of, copies
            return copies

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies; 0 while they are not needed."""
        made: dict[str, Tensor] = vars(self).get("weights", {})
        return sum(weight.nbytes for weight in made.values())


class _Forward:
    """A linear module's forward with another weight."""

    def __init__(self, owner: MergedCopies, name: str, module: Any) -> None:
        self.owner, self.name, self.module = owner, name, module

    def __call__(self, inputs: Tensor) -> Tensor:
        weight = self.owner.weights[self.name]
        if isinstance(self.module, Conv1D):
            weight = weight.T
        return nn.functional.linear(inputs, weight, self.module.bias)


#: The copies of each update, and what identifies their sources. They are not an attribute of the
#: update, so models are copied and pickled without them.
_COPIES: WeakKeyDictionary[LowRank, tuple[Hashable, dict[str, Tensor]]] = WeakKeyDictionary()
_COPYING = threading.Lock()


def _copyable(module: Any, factors: Factors) -> bool:
    """Whether a module only multiplies with a plain weight that is not split."""
    runs = getattr(plain(module, "forward"), "__func__", None)
    shape = factors.up.shape[0], factors.down.shape[1]
    if isinstance(module, Conv1D):
        shape = shape[::-1]
    return (
        runs in (nn.Linear.forward, Conv1D.forward)
        and not _unmergeable(module)
        and tuple(module.weight.shape) == shape
    )


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


def _merged(module: Any, factors: Factors) -> Tensor:
    """The weight of ``module`` with the update added."""
    weight = module.weight.data
    precise = torch.promote_types(weight.dtype, torch.float32)
    down, up = (part.to(weight.device, precise) for part in factors[:2])
    update = (up @ down) * factors.scale  # (out_features, in_features)
    if isinstance(module, Conv1D):
        update = update.T
    return (weight.to(precise) + update).to(weight.dtype)


def _shared_weights(model: nn.Module) -> set[int]:
    """Ids of the weights that several modules share."""
    seen: set[int] = set()
    shared: set[int] = set()
    for _, module in _walk(model):
        for parameter in module.parameters(recurse=False):
            (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _unmergeable(module: Any) -> str:
    """Why updates cannot be merged into a module; empty if they can."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, (nn.Linear, Conv1D)):
        return f"is a {type(module).__name__}"
    # Quantised parameters are tensor subclasses or integers; sharded ones are DTensors, or
    # DeepSpeed's, which are whole within forwards only.
    if type(weight) is not nn.Parameter or not weight.dtype.is_floating_point:
        kind = f"{type(weight).__name__} of {getattr(weight, 'dtype', None)}"
        return f"is quantised or sharded ({kind})"
    if hasattr(weight, "ds_id"):
        return "is sharded (DeepSpeed)"
    if weight.dtype.itemsize < 2:
        return f"is stored in {weight.dtype}"
    return "has no weight in memory" if weight.is_meta else ""


def _check_mergeable(name: str, module: Any, shared: set[int]) -> None:
    """Raise a ValueError unless the module has a plain weight that it does not share."""
    reason = _unmergeable(module)
    if not reason and id(module.weight) in shared:
        reason = "shares its weight with another module"
    if reason:
        raise ValueError(
            f"cannot merge into {name}, which {reason}: leave the update unmerged, or load the "
            "model in bfloat16 or another plain type, in memory."
        )


def _bit_sum(weight: Tensor) -> int:
    """A checksum of the bits of a weight."""
    bits = weight.contiguous().view(_BITS[weight.element_size()])
    return int(bits.sum(dtype=torch.int64))
