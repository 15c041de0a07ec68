"""An adapter of ours: its config, and the layer under the base model that holds its parameters.

It replaces no module of the base model: it hangs under it as `spec_modules`, and drafters read it
(:mod:`hf_spec.methods.active_adapter`). The base computes what it computed before, unless the type
says otherwise by overriding `SpecAdapterLayer.connect`. How PEFT comes to know of it stands in
:mod:`hf_spec.methods.peft_bridge`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftConfig
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import GenerationMixin

from hf_spec.methods.base_facts import check_facts, facts_of, warn_of_other_weights
from hf_spec.methods.companions import write_companions
from hf_spec.methods.fingerprint import fingerprint
from hf_spec.methods.stored_weights import (
    GivenWeights,  # noqa: F401 (in a type comment)
    StoredWeights,
    TensorFacts,
    check_fit,
    tensor_facts,
)
from modeling_patches.support import check_model

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
    #: Whether the model computes something else while an adapter is active.
    changes_model: ClassVar[bool] = False

    format_version: int = field(
        default=FORMAT_VERSION, metadata={"help": "Layout of the saved adapter."}
    )
    base_facts: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Shape of the base model; recorded when a fresh adapter is attached."},
    )
    base_fingerprint: str | None = field(
        default=None, metadata={"help": "Hash of the base model's weights; recorded likewise."}
    )

    # Not fields: where a config was read from, what was found there and under which name it was
    # attached are not saved.
    _source = None  # type: StoredWeights | GivenWeights | None
    _home = None  # type: StoredWeights | None
    _downloaded = None  # type: dict[str, Path | None] | None
    _adapter_name = None  # type: str | None

    def __post_init__(self) -> None:
        name = type(self).type_name
        if self.task_type not in (None, "CAUSAL_LM"):
            raise ValueError(
                f"adapters of type {name} are for causal language models, got task_type="
                f"{self.task_type!r}. Leave it out."
            )
        self.task_type: Any = "CAUSAL_LM"  # what AutoPeftModelForCausalLM looks for
        super().__post_init__()
        if self.peft_type not in (None, name):
            raise ValueError(
                f"{type(self).__name__} is of PEFT type {name}, got peft_type={self.peft_type!r}. "
                "Load the config with PeftConfig.from_pretrained, which picks the class."
            )
        self.peft_type: Any = SpecPeftType(name)
        check_version(name, self.format_version)
        for key, kind in (("base_facts", dict), ("base_fingerprint", str)):
            value = getattr(self, key)
            if value is not None and not isinstance(value, kind):
                raise ValueError(
                    f"{key} must be a {kind.__name__} or None, got {value!r}. Leave it out: "
                    "attaching the adapter records it."
                )

    def check_base(self, model: nn.Module) -> None:
        """Raise ValueError if the adapter does not fit `model`; runs before anything is attached.

        Facts about the base that the saved config should carry are recorded here, too; those of
        `base_facts` have been checked and recorded before.
        """
        if isinstance(model, GenerationMixin):
            check_model(model)

    @property
    def trains_base(self) -> bool:
        """Whether training changes the base model's own weights, which are then saved, too."""
        return False

    def training_defaults(self) -> dict[str, Any]:
        """Fields of `TrainingArguments` that differ from the defaults of the adapter's method.

        Raises:
            ValueError: there is nothing to train with this config.
        """
        return {}

    def untrained(self, progress: float) -> frozenset[str]:
        """Parameters, by the names that `build` gives them, that are not trained yet.

        Args:
            progress: share of the optimiser's steps that are done, from 0.
        """
        return frozenset()

    def match_base(self, model: nn.Module) -> None:
        """Raise ValueError if `model` has another shape than the base the adapter was made for.

        Other weights of the same shape are legitimate (a fine-tuned base) and only logged. A config
        that has not been trained yet takes on what it does not know.
        """
        base, name = self.base_model_name_or_path, type(self).type_name
        check_facts(name, self.base_facts or {}, base, model)
        found = facts_of(model)
        if not found:
            return
        weights = fingerprint(model)
        if not self.inference_mode:
            self.base_facts = {**found, **(self.base_facts or {})}
            self.base_fingerprint = self.base_fingerprint or weights
        if None not in (weights, self.base_fingerprint) and weights != self.base_fingerprint:
            warn_of_other_weights(name, base, self.base_fingerprint, weights)

    def read_source(self) -> dict[str, TensorFacts] | None:
        """What is known of the weights that will be loaded; None for an adapter that starts fresh.

        Raises:
            ValueError: there are none to load, they are a pickle, or cannot be read.
        """
        source: Any = self._source
        self._source = None
        if source is None:
            return None
        if isinstance(source, StoredWeights):
            self._home = source
        found = source.read()
        # A config read from a folder without weights may serve for a fresh adapter.
        if found is None and (self.inference_mode or source.has_pickle()):
            raise source.absent()
        return found

    def file_beside(self, name: str) -> Path | None:
        """A file that lies where the adapter was loaded from; None if there is none.

        A local folder is looked into each time, the Hub is asked once.

        Raises:
            OSError: the Hub cannot be reached, or refuses.
        """
        home: Any = self._home
        if home is None:
            return None
        if os.path.isdir(home.place):
            found: Path | None = home.find(name)
            return found
        known = self._downloaded or {}
        if name not in known:
            self._downloaded = known = {**known, name: home.find(name)}
        return known[name]

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write `adapter_config.json`, and beside it what makes `SpecConfig` and
        `custom_generate` work: the strategy with its default options, unless the folder names one.
        """
        super().save_pretrained(str(save_directory), **kwargs)
        # PeftModel saves an adapter not named "default" into a folder of that name, which neither
        # custom_generate nor push_to_hub looks into.
        name = os.path.basename(os.path.normpath(save_directory))
        inside = self._adapter_name not in (None, "default") and name == self._adapter_name
        write_companions(save_directory, type(self), shim=not inside)


class SpecAdapterLayer(BaseTunerLayer, nn.Module):
    """The parameters of all adapters of one PEFT type on a model; replaces nothing.

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

    def stored_facts(self, adapter_name: str) -> dict[str, TensorFacts]:
        """What is stored of an adapter: names on disk, shapes and types."""
        tensors: Mapping[str, torch.Tensor] = self.weights(adapter_name)
        if not tensors:
            tensors = {"format": getattr(self, f"{self.prefix}format")[adapter_name]}
        return tensor_facts(names_on_disk(self.prefix, tensors))

    def update_layer(
        self,
        adapter_name: str,
        config: SpecPeftConfig,
        model: nn.Module,
        stored: Mapping[str, TensorFacts] | None = None,
    ) -> None:
        """Build the adapter `adapter_name` and add it to the containers.

        Raises:
            ValueError: `stored`, the weights that will be loaded into it, do not fit.
        """
        tensors = self.build(config, model)
        for name in tensors:
            if not name.isidentifier() or self.prefix in name or name == "format":
                raise ValueError(
                    f"{type(self).__name__}.build named a parameter {name!r}; names must be "
                    f"identifiers that do not contain {self.prefix!r}, nor 'format'. Rename it."
                )
        marker = torch.tensor([config.format_version])
        if stored is not None:
            expected = tensor_facts(names_on_disk(self.prefix, tensors or {"format": marker}))
            check_fit(config.type_name, stored, expected)
        if not tensors:
            getattr(self, f"{self.prefix}format")[adapter_name] = marker
        device, dtype = placement(model)
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
        """Nothing to do: a LoRA beside us is being merged (ours goes through `merge_into`)."""

    def unmerge(self) -> None:
        """Nothing to do."""

    # A type whose adapters change what the base computes overrides these four.

    def connect(self, adapter_name: str, config: SpecPeftConfig, model: nn.Module) -> None:
        """Hook into `model` what an adapter changes of it, once attached. Nothing by default.

        What is hooked in follows `active_adapters` and `disable_adapters`, and goes in
        `delete_adapter`.
        """

    def disconnect(self, keep_merged: bool = False) -> None:
        """Take off what `connect` has hooked in, and what was merged, as the layer is to go."""

    def merge_into(
        self, model: nn.Module, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> None:
        """Put what the active adapter changes of `model` into its weights."""
        raise _no_merge(self.prefix)

    def unmerge_from(self, model: nn.Module) -> None:
        """Undo `merge_into`."""

    def mergeable(self) -> list[str]:
        """Active adapters that change weights of the base and are not merged."""
        return []


# -- where it hangs ------------------------------------------------------------------------------


def base_of(model: nn.Module) -> Any:
    """The base model itself: not compiled, without a `PeftModel` around it."""
    base: Any = getattr(model, "_orig_mod", model)
    return base.get_base_model() if hasattr(base, "get_base_model") else base


def container_key(prefix: str) -> str:
    # Not the bare type: ".bita." inside the keys would be taken for an adapter that is named so.
    return f"type_{prefix.removesuffix('_')}"


def layer_of(model: Any, prefix: str) -> SpecAdapterLayer | None:
    container = getattr(model, CONTAINER, None)
    return (
        container[container_key(prefix)]
        if container is not None and container_key(prefix) in container
        else None
    )


def layers_of(base: Any) -> list[Any]:
    """Our layers on a base model, one per type."""
    return list(getattr(base, CONTAINER, nn.ModuleDict()).values())


def names_on_disk(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of an adapter under their names on disk, without PEFT's prefix."""
    return {f"{CONTAINER}.{container_key(prefix)}.{prefix}{name}": t for name, t in tensors.items()}


def placement(model: Any) -> tuple[torch.device, torch.dtype]:
    """Where and as what an adapter lives: like the embeddings, which quantisation leaves be."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = getattr(embeddings, "weight", None)
    if weight is None:
        weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    device = weight.device
    if device.type == "meta":  # offloaded by accelerate, which brings it here to compute
        device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None) or device
    return torch.device(device), weight.dtype


def check_version(name: str, version: Any) -> None:
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"this {name} adapter has format_version={version!r}; this hf_spec reads versions 1 to "
            f"{FORMAT_VERSION}. Upgrade with `pip install -U hf_spec`."
        )


def _no_merge(prefix: str) -> ValueError:
    name = prefix.removesuffix("_").upper()
    return ValueError(
        f"a {name} adapter cannot be merged: it does not change the weights of the base model. Use "
        "unload() to take it off."
    )
