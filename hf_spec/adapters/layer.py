"""Modules that PEFT attaches to a model for an adapter of ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from hf_spec.adapters.checkpoint import PEFT_PREFIX, Origin, check_weights
from hf_spec.core.checks import MAX_ALPHA, number
from hf_spec.modeling_patches.low_rank import Factors, LowRank
from hf_spec.modeling_patches.modules import compiled
from hf_spec.modeling_patches.weights import features, loaded, placement

# -- What one adapter has learned: a module with named parameters, built once from its config ------

#: A buffer of adapters that have no tensors. PEFT would write no file of weights for these, and
#: not load them again.
FORMAT = "format"


class Adapter(nn.Module):
    """The parameters of one adapter; each method has a subclass.

    `__init__` makes parameters, buffers and modules, or calls :meth:`hold`. Parameters are trained,
    buffers are not. Floating-point tensors will be cast to the dtype of the base's embeddings, and
    all tensors move to their device. `model` is the base model; it may be read, to start from its
    weights, but not changed. Loading a saved adapter builds it, too, so shapes must follow from
    `config` and `model.config` alone. torch's default device is "cpu" meanwhile, or "meta" if the
    weights are loaded later.

    In files, a tensor is called ``<type>_<name>``, where the name is that in the module.

    Attributes:
        config: its config.
        name: its name on the model.
        origin: where it was loaded from; None for a new one.
        update: its low-rank updates of the base's modules; None if it has none.
        beside_model: (of the class) the base's forward does not run it, whatever runs then is part
            of its low-rank updates.
    """

    beside_model = True

    def __init__(self, config: Any, model: Any) -> None:
        super().__init__()
        self.config = config
        self.name = "default"
        self.origin: Origin | None = None
        self.update: LowRank | None = None

    @classmethod
    def build(cls, config: Any, model: Any, on_meta: bool = False) -> Adapter:
        """The adapter as a base model gets it; without memory for its weights if `on_meta`."""
        device, dtype = placement(model)
        with torch.device("meta" if on_meta else "cpu"):
            adapter = cls(config, model)
            if not adapter.state_dict():
                adapter.register_buffer(FORMAT, torch.tensor([config.format_version]))
        # PEFT may have put parameters on the meta device meanwhile, but not buffers.
        on_meta = on_meta or any(parameter.is_meta for parameter in adapter.parameters())
        return adapter.to("meta" if on_meta else device, dtype).train(model.training)

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors by name: parameters, or buffers if they are of integers."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                self.register_parameter(name, nn.Parameter(tensor.detach().clone()))
            else:
                self.register_buffer(name, tensor)

    def tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers by name, also where accelerate has offloaded them."""
        found: dict[str, Tensor] = {}
        for path, part in self.named_modules(prefix=""):
            with loaded(part):
                own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
                # DeepSpeed gathers a parameter when it is read as an attribute.
                found |= {f"{path}.{name}".lstrip("."): getattr(part, name) for name, _ in own}
        found.pop(FORMAT, None)
        return found

    @property
    def _prefix(self) -> str:
        kind = type(self.config).type_name
        return f"{CONTAINER}.{_key(kind)}.{prefix_of(kind)}"

    def for_file(self) -> dict[str, Tensor]:
        """Its tensors by the names that a file of weights has."""
        prefix = PEFT_PREFIX + self._prefix
        return {prefix + name: one.cpu().contiguous() for name, one in self.state_dict().items()}

    def from_file(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a file of weights, by their names in the state dict; a ValueError unless
        they are those of this adapter, and finite in the dtype of the model."""
        stored = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in stored.items()}
        kind, prefix, own = type(self.config).type_name, self._prefix, self.state_dict()
        check_weights(kind, stored, {prefix + name: own[name] for name in own}, dtype)
        return {name: stored[prefix + name] for name in own}

    def set_vocabulary(self, tokens: Tensor, model: Any) -> None:
        """Set the draft vocabulary of a new adapter that has one: ``(tokens,)`` int64 ids in
        ascending order, as many as its config says."""
        vocabulary: Any = self.draft_vocabulary
        vocabulary.copy_(tokens)

    @property
    def base_update(self) -> LowRank | None:
        """The updates that are part of the base model while the adapter is active."""
        return self.update if self.config.changes_model else None


# -- Low-rank updates as part of an adapter, shared by the methods that train them -----------------
#
# The two factors of each linear module are stored in the adapter's file under flat names derived
# from the module's: `down__model__layers__0__mlp__up_proj` and `up__...`.

DOWN, UP = "down__", "up__"
#: The rule of alpha.
ALPHA = number(0.0, MAX_ALPHA, open_low=True)


def check_targets(name: str, names: Any) -> None:
    """The rule of fields that name modules: raises a ValueError unless they do."""
    listed = isinstance(names, Sequence) and all(isinstance(one, str) and one for one in names)
    if not (listed and names):
        raise ValueError(
            f"{name}={names!r}: give a list of names of linear modules, a regular "
            "expression, or None for all linear modules of the decoder layers."
        )
    if isinstance(names, str):
        compiled(names)


class LowRankAdapter(Adapter):
    """An adapter with low-rank updates of linear modules of the base."""

    def hold_factors(self, modules: Mapping[str, nn.Module], rank: int, alpha: float) -> None:
        """Add the factors of updates of these modules of the base, scaled by alpha / rank, and
        `update`. As in LoRA, A is random and B = 0, so that nothing changes yet."""
        self.scale = alpha / rank
        for name, module in modules.items():
            inputs, outputs = features(module) or (0, 0)
            down = torch.empty(rank, inputs)
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))
            self.hold({_flat(DOWN, name): down, _flat(UP, name): torch.zeros(outputs, rank)})
        self.update = LowRank(modules, self.factors) if modules else None

    def factors(self, name: str) -> Factors:
        """The current update of the module of this name."""
        offloaded = getattr(self, _flat(UP, name)).is_meta
        with loaded(self) if offloaded else nullcontext():
            down, up = (getattr(self, _flat(part, name)) for part in (DOWN, UP))
        return Factors(down, up, self.scale)


def _flat(part: str, name: str) -> str:
    return part + name.replace(".", "__")


# -- The layer that holds the adapters of one PEFT type on the base model --------------------------
#
# It replaces no module of the base model: it is added to it as `spec_modules`, and drafters read it
# (:mod:`hf_spec.adapters.loading`). The base model's outputs do not change, unless an active
# adapter updates its modules (`Adapter.base_update`). :mod:`hf_spec.adapters.tuner` registers it
# with PEFT.

#: Attribute of the base model that holds our layers, one per PEFT type.
CONTAINER = "spec_modules"
_left_out = ContextVar("_left_out", default=False)


class SpecAdapterLayer(BaseTunerLayer, nn.Module):
    """All adapters of one PEFT type on a model, such as "BITA"; replaces nothing."""

    # Those of BaseTunerLayer come from a wrapped layer. There is none, but Transformers reads them.
    weight = None
    bias = None

    def __init__(self, peft_type: str) -> None:
        super().__init__()
        self.peft_type = peft_type
        self.adapter_layer_names = (f"{prefix_of(peft_type)}adapters",)
        self.add_module(self.adapter_layer_names[0], nn.ModuleDict())
        self.register_load_state_dict_post_hook(_miss_none)

    @property
    def adapters(self) -> Any:
        """An `nn.ModuleDict` of `Adapter`."""
        return getattr(self, self.adapter_layer_names[0])

    def paths(self, name: str) -> list[str]:
        """The names of an adapter's tensors in the base model's state dict."""
        start = f"{CONTAINER}.{_key(self.peft_type)}.{self.adapter_layer_names[0]}.{name}"
        return [f"{start}.{one}" for one in self.adapters[name].state_dict()]

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        self._follow(() if self.disable_adapters else names)
        super().set_adapter(adapter_names, inference_mode)
        for name in self.for_drafting():  # PEFT would train any that is chosen
            self.adapters[name].requires_grad_(False)

    def enable_adapters(self, enabled: bool) -> None:
        if not enabled:
            self._follow(())
        super().enable_adapters(enabled)
        if enabled:
            active: Any = self.active_adapters
            self._follow(active)

    def delete_adapter(self, adapter_name: str) -> None:
        self._follow([name for name in self.updating() if name != adapter_name])
        if adapter_name in self.adapters:
            super().delete_adapter(adapter_name)
        else:  # of another type: PEFT would activate one of this
            active: Any = self.active_adapters
            self._active_adapter = [one for one in active if one != adapter_name]

    def _follow(self, active: Sequence[str]) -> None:
        """Attach the updates of these adapters to the base; undo those of others, and merges."""
        for name, update in self._updates().items():
            if name in active:
                update.attach()
            else:
                update.unmerge()
                update.detach()

    def _updates(self) -> dict[str, LowRank]:
        """The updates of the base that adapters have."""
        every = {name: adapter.base_update for name, adapter in self.adapters.items()}
        return {name: update for name, update in every.items() if update is not None}

    def for_drafting(self) -> set[str]:
        """The adapters that were loaded for inference, not to be trained."""
        return {name for name, one in self.adapters.items() if one.config.inference_mode}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return kwargs["destination"] if _left_out.get() else super().state_dict(*args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Do nothing: PEFT is merging a LoRA on the same model. See `merge_into`."""

    def unmerge(self) -> None:
        """Do nothing; see `unmerge_from_base`."""

    def merge_into(
        self, model: nn.Module, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> None:
        """Add the updates of the active adapter to the base's weights; a ValueError if there are
        none, or the weights cannot be changed."""
        active, chosen = self.updating(), cast("list[str]", self.active_adapters)
        names = active if adapter_names is None else list(adapter_names)
        if len(active) != 1 or names != active:
            raise ValueError(
                f"merging takes the one active {self.peft_type} adapter that changes the weights "
                f"of the base model, got {names}: of those active "
                f"({', '.join(chosen) or 'none'}), {', '.join(active) or 'none'} "
                "changes them. Activate one by set_adapter; to take off adapters that change none, "
                "use unload()."
            )
        self.adapters[active[0]].base_update.merge(model, check_finite=safe_merge)

    def unmerge_from_base(self) -> None:
        """Undo `merge_into`."""
        for update in self._updates().values():
            update.unmerge()

    @property
    def merged_adapters(self) -> list[str]:
        """The adapters whose updates are merged."""
        return [name for name, update in self._updates().items() if update.merged]

    def updating(self) -> list[str]:
        """The adapters whose updates are part of the base model now."""
        return [name for name, update in self._updates().items() if update.attached]

    def add_to(self, model: Any) -> None:
        if not hasattr(model, CONTAINER):
            model.add_module(CONTAINER, nn.ModuleDict())
        getattr(model, CONTAINER)[_key(self.peft_type)] = self
        # Loading puts tensors that a device map does not name on the CPU.
        device_map = getattr(model, "hf_device_map", None)
        if device_map and "" not in device_map:
            device_map[CONTAINER] = str(placement(model).device)

    def remove_from(self, model: Any, keep_merged: bool = False) -> None:
        """Take the layer and all updates off the base model, but for merged ones if these stay."""
        if not keep_merged:
            self.unmerge_from_base()
        for update in self._updates().values():
            update.detach()
        del getattr(model, CONTAINER)[_key(self.peft_type)]
        if not getattr(model, CONTAINER):
            delattr(model, CONTAINER)


def prefix_of(peft_type: str) -> str:
    """What the names of an adapter's tensors begin with."""
    return f"{peft_type.lower()}_"


def _key(peft_type: str) -> str:
    # Not just the type: ".bita." inside the keys would be taken for an adapter of that name.
    return f"type_{peft_type.lower()}"


def layer_of(model: Any, peft_type: str) -> Any:
    """hf_spec's layer for a PEFT type on a base model; None if there is none."""
    container, key = getattr(model, CONTAINER, {}), _key(peft_type)
    return container[key] if key in container else None  # noqa: SIM401 (ModuleDict has no get)


def layers_of(base: Any) -> list[Any]:
    """hf_spec's layers on a base model, one per PEFT type."""
    return list(getattr(base, CONTAINER, nn.ModuleDict()).values())


def for_drafting(base: Any) -> set[str]:
    """The adapters of hf_spec on a base model that were loaded for inference. They draft; what is
    trained and saved of the model does not depend on them."""
    return {name for layer in layers_of(base) for name in layer.for_drafting()}


@contextmanager
def left_out() -> Iterator[None]:
    """State dicts made within the block hold no tensors of hf_spec's adapters."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def _miss_none(layer: SpecAdapterLayer, incompatible: Any) -> None:
    # A model's weights are complete without adapters for drafting, whose own are checked elsewhere.
    if layer.for_drafting() == {*layer.adapters}:
        own, missing = f"{CONTAINER}.{_key(layer.peft_type)}.", incompatible.missing_keys
        missing[:] = [key for key in missing if own not in key]
