"""The layer that holds an adapter's parameters on the base model.

It replaces no module of the base model: it is added to it as `spec_modules`, and drafters read it
(:mod:`hf_spec.adapters.active`). The base model's outputs do not change, unless the type overrides
`SpecAdapterLayer.connect`. :mod:`hf_spec.adapters.tuner` registers it with PEFT.
"""

from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_spec.adapters.checkpoint import Origin
from hf_spec.adapters.config import SpecPeftConfig
from modeling_patches.weights import held, placement

#: Attribute of the base model that holds our layers, one per PEFT type.
CONTAINER = "spec_modules"


class SpecAdapterLayer(BaseTunerLayer, nn.Module):
    """The parameters of all adapters of one PEFT type on a model; replaces nothing.

    Subclasses override `build`. Each tensor it names becomes a `ParameterDict` that is keyed by
    adapter name and called `<type>_<name>`: only such flat keys survive PEFT's and Transformers'
    renaming (`spec_modules.type_bita.bita_masks.default` in the model, without `.default` on disk).
    """

    # Those of BaseTunerLayer come from a wrapped layer. There is none, but Transformers reads them.
    weight = None
    bias = None

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        #: By adapter. The model's `peft_config` loses them when an adapter of another type takes a
        #: name, or is unloaded.
        self.configs: dict[str, SpecPeftConfig] = {}
        #: By adapter that was loaded.
        self.origins: dict[str, Origin] = {}
        self.adapter_layer_names: tuple[str, ...] = ()  # containers of weights
        # An adapter without weights saves this number: without any tensor, no safetensors file is
        # written, and loading fails.
        marker = f"{prefix}format"
        self.other_param_names: tuple[str, ...] = (marker,)
        self.add_module(marker, BufferDict(persistent=True))

    def build(self, config: SpecPeftConfig, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """The initial parameters of an adapter: name -> tensor. None by default.

        Names are identifiers other than "format". Floating-point tensors will be cast to the dtype
        of the base's embeddings; integers are not trained. All move to these embeddings' device.
        `model` is the base model; it may be read (to initialise from its weights) but not changed.
        Loading a saved adapter calls this as well, so shapes must follow from `config` and
        `model.config` alone. It is called with torch's default device set to "cpu".
        """
        return {}

    def weights(self, adapter_name: str) -> dict[str, torch.Tensor]:
        """The parameters of an adapter, by their names in `build`."""
        attributes = (*self.adapter_layer_names, *self.other_param_names)
        containers = ((n.removeprefix(self.prefix), getattr(self, n)) for n in attributes)
        return {
            name: held(values, adapter_name)
            for name, values in containers
            if name != "format" and adapter_name in values
        }

    def stored(self, adapter_name: str) -> dict[str, torch.Tensor]:
        """The tensors that are stored of an adapter, by name on disk without PEFT's prefix."""
        tensors: Mapping[str, torch.Tensor] = self.weights(adapter_name)
        if not tensors:
            tensors = {"format": getattr(self, f"{self.prefix}format")[adapter_name]}
        return names_on_disk(self.prefix, tensors)

    def update_layer(self, adapter_name: str, config: SpecPeftConfig, model: nn.Module) -> None:
        """Build the adapter `adapter_name` and add it to the containers.

        Args:
            adapter_name: its name.
            config: its config.
            model: the base model.
        """
        device, dtype = placement(model)
        with torch.device("cpu"):
            tensors = self.build(config, model)
            if not tensors:
                marker = torch.tensor([config.format_version])
                getattr(self, f"{self.prefix}format")[adapter_name] = marker
        for name in tensors:
            if not name.isidentifier() or self.prefix in name or name == "format":
                raise ValueError(
                    f"{type(self).__name__}.build named a parameter {name!r}; names must be "
                    f"identifiers that do not contain {self.prefix!r}, nor 'format'. Rename it."
                )
        self.configs[adapter_name] = config
        for name, tensor in tensors.items():
            attribute = f"{self.prefix}{name}"
            tensor = tensor.detach().clone().to(device)
            if tensor.is_floating_point():
                if attribute not in self.adapter_layer_names:
                    self.add_module(attribute, nn.ParameterDict())
                    self.adapter_layer_names += (attribute,)
                getattr(self, attribute)[adapter_name] = nn.Parameter(tensor.to(dtype))
            else:
                if attribute not in self.other_param_names:
                    self.add_module(attribute, BufferDict(persistent=True))
                    self.other_param_names += (attribute,)
                getattr(self, attribute)[adapter_name] = tensor

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self.configs.pop(adapter_name, None)
        self.origins.pop(adapter_name, None)

    def _get_available_adapters(self) -> set[str]:  # PEFT's sees parameters only
        return set(BaseTunerLayer._all_available_adapter_names(self))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Do nothing: PEFT is merging a LoRA on the same model. See `merge_into`."""

    def unmerge(self) -> None:
        """Do nothing; see `unmerge_from`."""

    # Types whose adapters change the base model's output override these four.

    def connect(self, adapter_name: str, config: SpecPeftConfig, model: nn.Module) -> None:
        """Install an attached adapter's changes to `model`. Does nothing by default.

        The changes follow `active_adapters` and `disable_adapters`, and `delete_adapter` removes
        them.
        """

    def disconnect(self, keep_merged: bool = False) -> None:
        """Undo `connect`, and merges, before the layer is removed."""

    def merge_into(
        self, model: nn.Module, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> None:
        """Merge the active adapter's changes to `model` into its weights."""
        name = self.prefix.removesuffix("_").upper()
        raise ValueError(
            f"a {name} adapter cannot be merged: it does not change the weights of the base model. "
            "Use unload() to take it off."
        )

    def unmerge_from(self, model: nn.Module) -> None:
        """Undo `merge_into`."""

    def mergeable(self) -> list[str]:
        """Active adapters that change weights of the base and are not merged."""
        return []


# -- access through the base model ---------------------------------------------------------------


def base_of(model: nn.Module) -> Any:
    """The base model itself: not compiled, without a `PeftModel` around it."""
    base: Any = getattr(model, "_orig_mod", model)
    return base_of(base.get_base_model()) if hasattr(base, "get_base_model") else base


def container_key(prefix: str) -> str:
    # Not just the type: ".bita." inside the keys would be taken for an adapter of that name.
    return f"type_{prefix.removesuffix('_')}"


def layer_of(model: Any, prefix: str) -> SpecAdapterLayer | None:
    container, key = getattr(model, CONTAINER, {}), container_key(prefix)
    return container[key] if key in container else None  # noqa: SIM401 (ModuleDict has no get)


def layers_of(base: Any) -> list[Any]:
    """hf_spec's layers on a base model, one per PEFT type."""
    return list(getattr(base, CONTAINER, nn.ModuleDict()).values())


def names_on_disk(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of an adapter under their names on disk, without PEFT's prefix."""
    return {f"{CONTAINER}.{container_key(prefix)}.{prefix}{name}": t for name, t in tensors.items()}
