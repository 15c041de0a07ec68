"""What a method has learned, as a PEFT type of our own: the one place touching `peft.mapping`.

PEFT's own registration refuses types outside its enum, so this module writes PEFT's tables itself.
A method supplies a config dataclass (`SpecPeftConfig`) and a layer class (`SpecAdapterLayer`) whose
`build` makes its parameters; `register` does the rest. From then on `get_peft_model`,
`PeftModel.from_pretrained`, `model.load_adapter` and all that builds on them know the type.

An adapter of ours replaces no module of the base model: it hangs under it as `spec_modules`, and
drafters read it with `find_active`. The base computes what it computed before, unless the type
says otherwise by overriding `SpecAdapterLayer.connect`.

What comes from outside is checked before anything is attached, through every way in: keys of the
config, the base model, names and shapes of the stored weights, which are safetensors.

Importing this costs what importing peft costs: 0.2 s on top of torch and transformers, which take
3 s on the same machine, so `import hf_spec` can register eagerly.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from packaging.version import Version
from peft import PeftConfig, PeftModel
from peft import __version__ as peft_version
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.integrations import init_empty_weights
from torch import nn
from transformers.integrations.peft import PeftAdapterMixin

from hf_spec.methods.base_facts import check_facts, facts_of, warn_of_other_weights
from hf_spec.methods.companions import write_companions
from hf_spec.methods.fingerprint import fingerprint
from hf_spec.methods.stored_weights import (
    GivenWeights,
    StoredWeights,
    TensorFacts,
    check_fit,
    tensor_facts,
)

#: Newest layout of adapter_config.json and weights this release reads and the one it writes.
FORMAT_VERSION = 1
#: Attribute of the base model under which our layers hang, one per PEFT type.
CONTAINER = "spec_modules"
#: ``objective(base model, adapter, **batch)``: what training minimises, {"loss": scalar, ...}.
Objective = Callable[..., dict[str, torch.Tensor]]


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
        _check_version(name, self.format_version)
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
        return tensor_facts(_on_disk(self.prefix, tensors))

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
            expected = tensor_facts(_on_disk(self.prefix, tensors or {"format": marker}))
            check_fit(config.type_name, stored, expected)
        if not tensors:
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


class SpecTuner(BaseTuner):
    """Attaches a `SpecAdapterLayer` to a base model; `register` derives one class per type."""

    tuner_layer_cls: type[SpecAdapterLayer]
    objective: ClassVar[Objective | None] = None
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
        config._adapter_name = adapter_name
        try:
            config.match_base(model)
            config.check_base(model)
            stored = config.read_source()
            layer = self.tuner_layer_cls(self.prefix) if layer is None else layer
            with init_empty_weights() if low_cpu_mem_usage else nullcontext():
                layer.update_layer(adapter_name, config, model, stored)
        except Exception:
            _forget(self, model, adapter_name)
            raise
        if is_new:
            _attach(model, self.prefix, layer)
        layer.connect(adapter_name, config, model)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        if first:  # as with PEFT's types, later adapters leave the trainability of others alone
            self._mark_only_adapters_as_trainable(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base model's forward; with ``anchors`` among the inputs, the training loss.

        Through here a loss is part of `PeftModel.forward`, where wrappers for several devices
        (accelerate, DDP, FSDP) look for it.
        """
        if "anchors" not in kwargs:
            return super().forward(*args, **kwargs)
        name = self.prefix.removesuffix("_").upper()
        if self.objective is None:
            raise ValueError(f"adapters of type {name} are not trained with `anchors`.")
        adapter = find_active(self.model, name)
        if adapter is None:
            raise ValueError(f"no adapter of type {name} is active: call set_adapter first.")
        # PeftModel hands on every argument of a forward, most of them None.
        given = {key: value for key, value in kwargs.items() if value is not None}
        # Trainer's count of tokens: our losses are means over sequences.
        given.pop("num_items_in_batch", None)
        return self.objective(self.model, adapter, *args, **given)

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("adapters of hf_spec replace no modules")

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        # PEFT would leave out what has no counterpart on either side.
        layer = _layer(_base(model), cls.prefix)
        if layer is not None:
            check_fit(config.type_name, tensor_facts(state_dict), layer.stored_facts(adapter_name))
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)

    def merge_adapter(
        self, adapter_names: list[str] | None = None, safe_merge: bool = False
    ) -> None:
        """Merge our adapter, and no other; refused by types that change nothing of the base."""
        self._own_layer.merge_into(self.model, safe_merge, adapter_names)

    def unmerge_adapter(self) -> None:
        """Undo `merge_adapter`, exactly; a LoRA beside us that is merged comes out, too."""
        self._own_layer.unmerge_from(self.model)
        super().unmerge_adapter()

    @property
    def _own_layer(self) -> SpecAdapterLayer:
        layer = _layer(self.model, self.prefix)
        assert layer is not None
        return layer

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = True,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        if merge:
            self._own_layer.merge_into(self.model, safe_merge, adapter_names)
        self._own_layer.disconnect(keep_merged=merge)
        container = getattr(self.model, CONTAINER)
        del container[_key(self.prefix)]
        if not container:
            delattr(self.model, CONTAINER)
        if hasattr(self.model, "peft_config"):
            del self.model.peft_config
        return self.model


def register(
    config_class: type[SpecPeftConfig],
    adapter_class: type[SpecAdapterLayer],
    objective: Objective | None = None,
) -> None:
    """Make `config_class.type_name` a PEFT type. Doing it again with the same classes is harmless.

    Args:
        config_class: its config.
        adapter_class: its parameters.
        objective: its training loss, which `PeftModel.forward` gives for batches with ``anchors``.

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
            "objective": None if objective is None else staticmethod(objective),
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
        ValueError: several adapters of the type are active, or the weights of the active one have
            not been loaded.
    """
    base = _base(model)
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
    if not active:
        return None
    unloaded = [name for name, weight in layer.weights(active[0]).items() if weight.is_meta]
    if unloaded:
        raise ValueError(
            f"the {peft_type} adapter {active[0]!r} was attached without its weights "
            f"({', '.join(unloaded)}): load it with model.load_adapter(...), or attach it without "
            "low_cpu_mem_usage."
        )
    return ActiveAdapter(active[0], base.peft_config[active[0]], layer)


def require_active(model: nn.Module, peft_type: str, strategy: str) -> ActiveAdapter:
    """The active adapter of `peft_type`; see `find_active`.

    Raises:
        ValueError: there is none, or there are several.
    """
    active = find_active(model, peft_type)
    if active is None:
        layer = _layer(_base(model), f"{peft_type.lower()}_")
        inactive = [] if layer is None else sorted(layer._get_available_adapters())
        remedy = f"load one with model.load_adapter(...), or train one: `hf-spec train {strategy}`"
        if inactive:
            name = inactive[0]
            remedy = f"activate {name!r} with enable_adapters() or set_adapter({name!r})"
        raise ValueError(
            f"assistant_strategy={strategy!r} needs an active adapter of type {peft_type}: "
            f"{remedy}."
        )
    return active


def active_adapter_config(model: nn.Module, peft_type: str) -> SpecPeftConfig | None:
    """The config of the active adapter of `peft_type`; see `find_active`."""
    active = find_active(model, peft_type)
    return None if active is None else active.config


def merge_adapter(model: nn.Module, safe_merge: bool = False) -> bool:
    """Put what the active adapters of hf_spec change of a model into its weights.

    A SPACE adapter's updates otherwise cost time in every forward. Its mask tokens stay, and so
    does what the model computes; :func:`unmerge_adapter`, disabling the adapter, deleting it or
    switching to another one puts the weights back bit for bit, from a copy kept until then.

    Args:
        model: a `PeftModel`, or a model that has loaded adapters itself.
        safe_merge: refuse results that are not finite.

    Returns:
        Whether there was anything to merge.

    Raises:
        ValueError: the weights cannot be changed, since they are quantised, offloaded or shared.
    """
    base = _base(model)
    layers = [layer for layer in _layers(base) if layer.mergeable()]
    for layer in layers:
        layer.merge_into(base, safe_merge)
    return bool(layers)


def unmerge_adapter(model: nn.Module) -> None:
    """Undo :func:`merge_adapter`; harmless where nothing is merged."""
    base = _base(model)
    for layer in _layers(base):
        layer.unmerge_from(base)


# ------------------------------------------------------------------------------------- the ways in
# What PEFT and Transformers offer no hook for; other adapters pass through untouched.


def _enter(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method `name` of `owner` by what `wrap` makes of it, unless that has happened."""
    owner = next(cls for cls in owner.__mro__ if name in vars(cls))
    found = vars(owner)[name]
    original = getattr(found, "__func__", found)
    if hasattr(original, "_hf_spec"):
        return
    replacement: Any = functools.wraps(original)(wrap(original))
    replacement._hf_spec = True
    setattr(owner, name, classmethod(replacement) if original is not found else replacement)


def _note_source(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftConfig.from_pretrained`: remember where the weights beside a config will be found."""

    def from_pretrained(
        cls: Any, pretrained_model_name_or_path: Any, subfolder: str | None = None, **kwargs: Any
    ) -> Any:
        config = original(cls, pretrained_model_name_or_path, subfolder, **kwargs)
        if isinstance(config, SpecPeftConfig):
            kwargs["subfolder"] = subfolder
            config._source = _stored(pretrained_model_name_or_path, kwargs)
        return config

    return from_pretrained


def _check_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftConfig.from_peft_type`: refuse unknown keys, which PEFT drops with a warning."""

    def from_peft_type(cls: Any, **kwargs: Any) -> Any:
        found = PEFT_TYPE_TO_CONFIG_MAPPING.get(kwargs.get("peft_type"), cls)
        if issubclass(found, SpecPeftConfig):
            _check_version(found.type_name, kwargs.get("format_version", FORMAT_VERSION))
            known = inspect.signature(found.__init__).parameters
            unknown = sorted(kwargs.keys() - known.keys())
            # A later PEFT may have fields for all configs; then its warning says enough.
            later = Version(kwargs.get("peft_version") or "0") > Version(peft_version)
            if unknown and not later:
                raise ValueError(
                    f"the config of this {found.type_name} adapter has unknown keys: "
                    f"{', '.join(unknown)}. {found.__name__} has {', '.join(sorted(_own(found)))}. "
                    "Correct adapter_config.json, or upgrade with `pip install -U hf_spec`."
                )
        return original(cls, **kwargs)

    return from_peft_type


def _check_before_reload(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftModel.load_adapter`: check weights for an adapter that is attached already."""

    def load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        config = self.peft_config.get(adapter_name)
        if isinstance(config, SpecPeftConfig):
            source = _stored(model_id, kwargs)
            layer: Any = _layer(_base(self), f"{config.type_name.lower()}_")
            found = source.read()
            if found is None:
                raise source.absent()
            check_fit(config.type_name, found, layer.stored_facts(adapter_name))
            config._home = source
        return original(self, model_id, adapter_name, *args, **kwargs)

    return load_adapter


def _note_given(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PreTrainedModel.load_adapter`: weights that are given with a config, rather than a place."""
    signature = inspect.signature(original)

    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        config = given.get("peft_config")
        if isinstance(config, SpecPeftConfig):
            tensors, place = given.get("adapter_state_dict"), given.get("peft_model_id")
            if tensors is not None:
                config._source = GivenWeights(tensors)
            elif place is not None:
                config._source = _stored(place, {**kwargs, **(given.get("adapter_kwargs") or {})})
        return original(self, *args, **kwargs)

    return load_adapter


_enter(PeftConfig, "from_pretrained", _note_source)
_enter(PeftConfig, "from_peft_type", _check_keys)
_enter(PeftModel, "load_adapter", _check_before_reload)
_enter(PeftAdapterMixin, "load_adapter", _note_given)


# --------------------------------------------------------------------------------------- internals


def _stored(place: Any, kwargs: dict[str, Any]) -> StoredWeights:
    """Weights at `place`; of the keywords, those that downloading takes."""
    return StoredWeights(str(place), PeftConfig._split_kwargs(kwargs)[0])


def _check_version(name: str, version: Any) -> None:
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"this {name} adapter has format_version={version!r}; this hf_spec reads versions 1 to "
            f"{FORMAT_VERSION}. Upgrade with `pip install -U hf_spec`."
        )


def _own(config_class: type[SpecPeftConfig]) -> set[str]:
    """The keys that a config has beyond PEFT's."""
    keys = inspect.signature(config_class.__init__).parameters.keys() - {"self"}
    return set(keys - inspect.signature(PeftConfig.__init__).parameters.keys())


def _base(model: nn.Module) -> Any:
    """The base model itself: not compiled, without a `PeftModel` around it."""
    base: Any = getattr(model, "_orig_mod", model)
    return base.get_base_model() if hasattr(base, "get_base_model") else base


def _on_disk(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of an adapter under their names on disk, without PEFT's prefix."""
    return {f"{CONTAINER}.{_key(prefix)}.{prefix}{name}": t for name, t in tensors.items()}


def _key(prefix: str) -> str:
    # Not the bare type: ".bita." inside the keys would be taken for an adapter that is named so.
    return f"type_{prefix.removesuffix('_')}"


def _layer(model: Any, prefix: str) -> SpecAdapterLayer | None:
    container = getattr(model, CONTAINER, None)
    return container[_key(prefix)] if container is not None and _key(prefix) in container else None


def _layers(base: Any) -> list[Any]:
    """Our layers on a base model, one per type."""
    return list(getattr(base, CONTAINER, nn.ModuleDict()).values())


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
