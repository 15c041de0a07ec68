"""The layer that holds the adapters of one PEFT type on the base model.

It replaces no module of the base model: it is added to it as `spec_modules`, and drafters read it
(:mod:`hf_spec.adapters.active`). The base model's outputs do not change, unless an active adapter
updates its modules (`Adapter.base_update`). :mod:`hf_spec.adapters.tuner` registers it with PEFT.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_spec.modeling_patches.low_rank import LowRank
from hf_spec.modeling_patches.weights import placement

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
        super().delete_adapter(adapter_name)

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


def name_on_disk(peft_type: str, name: str) -> str:
    """The name in files of an adapter's tensor, without PEFT's prefix."""
    return f"{CONTAINER}.{_key(peft_type)}.{prefix_of(peft_type)}{name}"
