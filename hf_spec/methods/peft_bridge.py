"""What a method has learned, as a PEFT type of our own: the one place touching `peft.mapping`.

PEFT's own registration refuses types outside its enum, so this module writes PEFT's tables itself.
A method supplies a config dataclass (`SpecPeftConfig`) and a layer class (`SpecAdapterLayer`) whose
`build` makes its parameters; `register` does the rest. From then on `get_peft_model`,
`PeftModel.from_pretrained`, `model.load_adapter` and all that builds on them know the type.

An adapter of ours replaces no module of the base model and hooks into none: it hangs under it as
`spec_modules`, so the base computes what it computed before. Drafters read it with `find_active`.

Importing this costs what importing peft costs: 0.2 s on top of torch and transformers, which take
3 s on the same machine, so `import hf_spec` can register eagerly.
"""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from peft import PeftConfig
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.integrations import init_empty_weights
from torch import nn

#: Newest layout of adapter_config.json and weights this release reads and the one it writes.
FORMAT_VERSION = 1
#: Attribute of the base model under which our layers hang, one per PEFT type.
CONTAINER = "spec_modules"


class SpecPeftType(str):
    """Name of one of our PEFT types: a string with the `name` and `value` of an enum member.

    PEFT and Transformers read `.value`, compare with strings and write JSON. A real enum would have
    to list all methods here, or could not be pickled.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        return str(self)

    @property
    def value(self) -> str:
        return str(self)


@dataclass
class SpecPeftConfig(PeftConfig):
    """Base of our adapter configs: a dataclass whose fields all have defaults that work.

    Subclasses set `type_name`, validate in `__post_init__` (calling this one) and may override
    `check_base`.
    """

    #: PEFT type, in capitals: "BITA".
    type_name: ClassVar[str] = ""

    format_version: int = field(
        default=FORMAT_VERSION, metadata={"help": "Layout of the saved adapter."}
    )

    def __post_init__(self) -> None:
        self.task_type: Any = (
            self.task_type or "CAUSAL_LM"
        )  # what AutoPeftModelForCausalLM looks for
        super().__post_init__()
        name = type(self).type_name
        if self.peft_type not in (None, name):
            raise ValueError(
                f"{type(self).__name__} is of PEFT type {name}, got peft_type={self.peft_type!r}. "
                "Load the config with PeftConfig.from_pretrained, which picks the class."
            )
        self.peft_type: Any = SpecPeftType(name)
        if type(self.format_version) is not int or not 1 <= self.format_version <= FORMAT_VERSION:
            raise ValueError(
                f"this {name} adapter has format_version={self.format_version!r}; this hf_spec "
                f"reads versions 1 to {FORMAT_VERSION}. Upgrade with `pip install -U hf_spec`."
            )

    def check_base(self, model: nn.Module) -> None:
        """Raise ValueError if the adapter does not fit `model`; runs before anything is attached.

        Facts about the base that the saved config should carry are recorded here, too.
        """


class SpecAdapterLayer(BaseTunerLayer, nn.Module):
    """The parameters of all adapters of one PEFT type on a model; replaces and hooks into nothing.

    Subclasses override `build`. Each tensor it names becomes a `ParameterDict` that is keyed by
    adapter name and called `<type>_<name>`: only such flat keys survive PEFT's and Transformers'
    renaming (`spec_modules.type_bita.bita_masks.default` in the model, without `.default` on disk).
    """

    # BaseTunerLayer's read them off a wrapped layer; there is none, and Transformers asks.
    weight = None
    bias = None

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.adapter_layer_names: tuple[str, ...] = ()  # containers of weights
        # A weightless adapter saves this one number, else no safetensors file would be written and
        # loading would look for one in vain.
        marker = f"{prefix}format"
        self.other_param_names: tuple[str, ...] = (marker,)
        self.add_module(marker, BufferDict(persistent=True))

    def build(self, config: SpecPeftConfig, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """The initial parameters of an adapter: name -> tensor. None by default.

        Names are identifiers other than "format". Tensors are floating-point; they will be cast to
        the dtype and moved to the device of the base's embeddings. `model` is the base model, to be
        read (for an initialisation from its weights) and not to be changed. Loading a saved adapter
        calls this as well, hence shapes follow from `config` and `model.config` alone.
        """
        return {}

    def weights(self, adapter_name: str) -> dict[str, torch.Tensor]:
        """The parameters of an adapter under the names that `build` gave them."""
        containers = (
            (n.removeprefix(self.prefix), getattr(self, n)) for n in self.adapter_layer_names
        )
        return {name: values[adapter_name] for name, values in containers if adapter_name in values}

    def update_layer(self, adapter_name: str, config: SpecPeftConfig, model: nn.Module) -> None:
        """Build the adapter `adapter_name` and add it to the containers."""
        tensors = self.build(config, model)
        for name in tensors:
            if not name.isidentifier() or self.prefix in name or name == "format":
                raise ValueError(
                    f"{type(self).__name__}.build named a parameter {name!r}; names must be "
                    f"identifiers that do not contain {self.prefix!r}, nor 'format'. Rename it."
                )
        if not tensors:
            marker = torch.tensor([config.format_version])
            getattr(self, f"{self.prefix}format")[adapter_name] = marker
        device, dtype = _placement(model)
        for name, tensor in tensors.items():
            attribute = f"{self.prefix}{name}"
            if attribute not in self.adapter_layer_names:
                self.add_module(attribute, nn.ParameterDict())
                self.adapter_layer_names += (attribute,)
            tensor = tensor.detach().clone().to(device=device, dtype=dtype)
            getattr(self, attribute)[adapter_name] = nn.Parameter(tensor)

    def _get_available_adapters(self) -> set[str]:  # PEFT's sees parameters only
        return set(BaseTunerLayer._all_available_adapter_names(self))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Nothing to do: a LoRA beside us is being merged (`SpecTuner` refuses to merge ours)."""

    def unmerge(self) -> None:
        """Nothing to do."""


class SpecTuner(BaseTuner):
    """Attaches a `SpecAdapterLayer` to a base model; `register` derives one class per type."""

    tuner_layer_cls: type[SpecAdapterLayer]
    target_module_mapping: ClassVar[dict[str, list[str]]] = {}

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the adapter's parameters under `model.spec_modules` (PEFT calls this)."""
        config = self.peft_config[adapter_name]
        first = not any(isinstance(module, BaseTunerLayer) for module in model.modules())
        layer = _layer(model, self.prefix)
        is_new = layer is None
        try:
            config.check_base(model)
            layer = self.tuner_layer_cls(self.prefix) if layer is None else layer
            with init_empty_weights() if low_cpu_mem_usage else nullcontext():
                layer.update_layer(adapter_name, config, model)
        except Exception:
            _forget(self, model, adapter_name)
            raise
        if is_new:
            _attach(model, self.prefix, layer)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        if first:  # as with PEFT's types, later adapters leave the trainability of others alone
            self._mark_only_adapters_as_trainable(model)

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("adapters of hf_spec replace no modules")

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refused: our adapters do not change the base's weights."""
        raise _no_merge(self.prefix)

    def _unload_and_optionally_merge(self, merge: bool = True, **kwargs: Any) -> nn.Module:
        if merge:
            raise _no_merge(self.prefix)
        container = getattr(self.model, CONTAINER)
        del container[_key(self.prefix)]
        if not container:
            delattr(self.model, CONTAINER)
        if hasattr(self.model, "peft_config"):
            del self.model.peft_config
        return self.model


def register(config_class: type[SpecPeftConfig], adapter_class: type[SpecAdapterLayer]) -> None:
    """Make `config_class.type_name` a PEFT type. Doing it again with the same classes is harmless.

    Raises:
        ValueError: a name that is not in capitals, is taken, or would confuse PEFT's key mapping.
    """
    name = config_class.type_name
    prefix = f"{name.lower()}_"
    if not re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", name) or prefix in f"{CONTAINER}.type_":
        raise ValueError(
            f"{config_class.__name__}.type_name must be capitals, digits and single underscores "
            f"(LAYER_SKIP) and no part of {CONTAINER!r}, got {name!r}."
        )
    known = PEFT_TYPE_TO_CONFIG_MAPPING.get(name)
    if known is config_class:
        return
    if known is not None and _path(known) != _path(config_class):  # equal paths: a reloaded module
        raise ValueError(
            f"the PEFT type {name} already belongs to {_path(known)}; choose another type_name for "
            f"{_path(config_class)}."
        )
    tuner_class = type(
        f"{adapter_class.__name__}Tuner",
        (SpecTuner,),
        {
            "prefix": prefix,
            "tuner_layer_cls": adapter_class,
            "__module__": adapter_class.__module__,
        },
    )
    peft_type: Any = SpecPeftType(name)
    PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] = config_class
    PEFT_TYPE_TO_TUNER_MAPPING[peft_type] = tuner_class
    PEFT_TYPE_TO_PREFIX_MAPPING[peft_type] = prefix


class ActiveAdapter(NamedTuple):
    """An active adapter: its name, its config, and the layer that holds its parameters."""

    name: str
    config: SpecPeftConfig
    layer: SpecAdapterLayer

    def weights(self) -> dict[str, torch.Tensor]:
        """Its parameters under the names that the method's `build` gave them."""
        return self.layer.weights(self.name)


def find_active(model: nn.Module, peft_type: str) -> ActiveAdapter | None:
    """The active adapter of `peft_type`, or None if there is none or adapters are disabled.

    Args:
        model: a `PeftModel`, the base model inside one, or a model that has loaded adapters itself;
            compiled or not.
        peft_type: "LAYER_SKIP".

    Raises:
        ValueError: several adapters of the type are active.
    """
    base: Any = getattr(model, "_orig_mod", model)
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    layer: Any = _layer(base, f"{peft_type.lower()}_")
    if layer is None or layer.disable_adapters:
        return None
    # The base's dictionary holds the configs of all types; ours is told by the layer's containers.
    available = layer._get_available_adapters()
    active = [name for name in layer.active_adapters if name in available]
    if len(active) > 1:
        raise ValueError(
            f"{len(active)} adapters of type {peft_type} are active ({', '.join(active)}), one is "
            f"needed. Choose it with model.set_adapter({active[0]!r})."
        )
    return ActiveAdapter(active[0], base.peft_config[active[0]], layer) if active else None


def active_adapter_config(model: nn.Module, peft_type: str) -> SpecPeftConfig | None:
    """The config of the active adapter of `peft_type`; see `find_active`."""
    active = find_active(model, peft_type)
    return None if active is None else active.config


# --------------------------------------------------------------------------------------- internals


def _key(prefix: str) -> str:
    # Not the bare type: ".bita." inside the keys would be taken for an adapter that is named so.
    return f"type_{prefix.removesuffix('_')}"


def _layer(model: Any, prefix: str) -> SpecAdapterLayer | None:
    container = getattr(model, CONTAINER, None)
    return container[_key(prefix)] if container is not None and _key(prefix) in container else None


def _attach(model: nn.Module, prefix: str, layer: SpecAdapterLayer) -> None:
    if not hasattr(model, CONTAINER):
        model.add_module(CONTAINER, nn.ModuleDict())
    layer.train(model.training)
    getattr(model, CONTAINER)[_key(prefix)] = layer
    # Loading puts tensors that the map of a model spread over devices does not name on the CPU.
    device_map = getattr(model, "hf_device_map", None)
    if device_map and "" not in device_map:
        device_map[CONTAINER] = str(_placement(model)[0])


def _placement(model: Any) -> tuple[torch.device, torch.dtype]:
    """Where and as what an adapter lives: like the embeddings, which quantisation leaves be."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = getattr(embeddings, "weight", None)
    if weight is None:
        weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    device = weight.device
    if device.type == "meta":  # offloaded by accelerate, which brings it here to compute
        device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None) or device
    return torch.device(device), weight.dtype


def _forget(tuner: SpecTuner, model: nn.Module, adapter_name: str) -> None:
    """Leave no trace of an adapter that could not be attached, so that the next try finds order."""
    tuner.peft_config.pop(adapter_name, None)
    if not getattr(model, "peft_config", None):
        # Transformers' add_adapter sets this before it attaches anything.
        model.__dict__.pop("_hf_peft_config_loaded", None)


def _no_merge(prefix: str) -> ValueError:
    name = prefix.removesuffix("_").upper()
    return ValueError(
        f"a {name} adapter cannot be merged: it does not change the weights of the base model. Use "
        "unload() to take it off."
    )


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
