"""PEFT's tuner class for adapters of ours, beside adapters of PEFT."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import peft as peft_integration
from transformers.integrations.peft import PeftAdapterMixin
from transformers.utils import ModelOutput

from hf_spec.adapters.checkpoint import PEFT_PREFIX
from hf_spec.adapters.config import SpecPeftConfig, SpecPeftType
from hf_spec.adapters.layer import (
    CONTAINER,
    Adapter,
    SpecAdapterLayer,
    for_drafting,
    layer_of,
    layers_of,
    left_out,
    prefix_of,
)
from hf_spec.adapters.loading import find_active, unchanged_on_error
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.per_call import patch_method
from hf_spec.modeling_patches.weights import placement
from hf_spec.target.sequences import IGNORED

# -- hf_spec's adapters beside others, such as a fine-tune's LoRA, and beside a base to be saved ---
#
# They hang on the base model, whatever is around it, such as a `PeftModel` of a LoRA; each type has
# an active adapter of its own. PEFT and Transformers refuse some of this, or change adapters of
# other types on the way. The functions here wrap their methods, which have no hooks for this;
# models without adapters of hf_spec pass through unchanged.


@patch_method(BaseTuner, "inject_adapter")
def inject_beside(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Adding an adapter of another type: hf_spec's are not there meanwhile, as PEFT freezes a base
    with the first adapter only, and some types, such as VeRA, compare fields of theirs with those
    of every config."""
    base, configs, own = unwrapped(model), self.peft_config, "peft_config" in vars(self)
    ours = getattr(base, CONTAINER, None)
    if ours is not None:
        delattr(base, CONTAINER)
    self.peft_config = {
        name: config for name, config in configs.items() if not isinstance(config, SpecPeftConfig)
    }
    try:
        original(self, model, *args, **kwargs)
    finally:
        configs.update(self.peft_config)
        del self.peft_config
        if own:
            self.peft_config = configs
        if ours is not None:
            setattr(base, CONTAINER, ours)


@patch_method(PeftAdapterMixin, "set_adapter")
def set_beside_others(original: Any, self: Any, adapter_name: str | list[str]) -> None:
    """`PreTrainedModel.set_adapter`: several adapters, some for drafting, which Transformers would
    refuse to save the others beside, or one with `modules_to_save` or `trainable_token_indices`,
    whose wrappers take no name but that adapter's."""
    names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
    configs = getattr(self, "peft_config", {})
    if not (names and configs.keys() >= set(names) and layers_of(self)):
        original(self, adapter_name)
        return
    others = [name for name in names if name not in for_drafting(self)] or names
    for module in self.modules():
        if isinstance(module, BaseTunerLayer):
            module.set_adapter(names if isinstance(module, SpecAdapterLayer) else others)
    for module in self.modules():  # after the layers that they hold
        if isinstance(module, AuxiliaryTrainingWrapper):
            own = module.check_set_adapter(names)
            module.set_adapter([] if own is None else own)


@patch_method(BaseTuner, "_unload_and_optionally_merge")
def keep_ours(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`BaseTuner.unload` and `merge_and_unload`: what they remove are not hf_spec's adapters."""
    model = original(self, *args, **kwargs)
    kept = {name: one.config for layer in layers_of(model) for name, one in layer.adapters.items()}
    if kept:
        model.peft_config = kept
        if isinstance(model, PeftAdapterMixin):
            model._hf_peft_config_loaded = True
    return model


@patch_method(PreTrainedModel, "save_pretrained")
def save_base(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`PreTrainedModel.save_pretrained`: the model without adapters of hf_spec, unless one is in
    training, or one of another type is attached by Transformers' methods, which saves it alone.

    Raises:
        ValueError: the weights hold the update of an adapter of hf_spec.
    """
    attached = self._hf_peft_config_loaded
    if not layers_of(self) or (attached and self.peft_config.keys() - for_drafting(self)):
        original(self, *args, **kwargs)
        return
    merged = [name for layer in layers_of(self) for name in layer.merged_adapters]
    if merged:
        raise ValueError(
            f"adapter {merged[0]!r} is merged into the weights, and would be applied twice to "
            "the saved model: call hf_spec.unmerge_adapter(model) before saving. Or, to save the "
            "merged model as one without the adapter, merge_and_unload() of a PeftModel."
        )
    given = inspect.signature(original).bind(self, *args, **kwargs)
    if (state := given.arguments.get("state_dict")) is not None:  # of FSDP or DeepSpeed
        state = {key: one for key, one in state.items() if not key.startswith(f"{CONTAINER}.")}
        given.arguments["state_dict"] = state
    self._hf_peft_config_loaded = False
    try:
        with left_out():
            original(*given.args, **given.kwargs)
    finally:
        self._hf_peft_config_loaded = attached


# -- Registers hf_spec's adapters as PEFT types; the only module that changes `peft.mapping` -------
#
# PEFT's own registration refuses types outside its enum, so this module writes PEFT's tables
# itself. A method supplies a config dataclass (`SpecPeftConfig`) and a class for what an adapter
# learns (`Adapter`); `register_type` does the rest. From then on `get_peft_model`,
# `PeftModel.from_pretrained`, `model.load_adapter` and all that builds on them know the type.
#
# Weights are checked in one place, whichever way they are loaded (:mod:`hf_spec.adapters.loading`).


class TrainingBatch(NamedTuple):
    """What `PeftModel.forward` gets in training.

    Attributes:
        input_ids: ``(batch, seq)`` prompts with the base's answers.
        labels: ``(batch, seq)`` the answers' tokens, -100 elsewhere.
        anchors: ``(batch, anchors)`` columns t: the model itself predicts token t + 1, the adapter
            those that follow it.
        attention_mask: ``(batch, seq)``, 0 for padding; None for no padding.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    anchors: torch.Tensor
    attention_mask: torch.Tensor | None = None


@dataclass
class TrainingOutput(ModelOutput):
    """The output of a `PeftModel` for a batch with ``anchors``.

    Attributes:
        loss: a scalar.
        logits: ``(..., vocab)`` of what was predicted, if the objective gives them.
        labels: ``(...)`` the tokens to predict there; -100 where there is none.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    labels: torch.Tensor | None = None


#: Returns the training loss of an adapter on the base model: the fields of `TrainingOutput`.
Objective = Callable[[Any, Adapter, TrainingBatch], dict[str, torch.Tensor]]


class Fit(Protocol):
    """Makes an adapter in one pass over answers, without gradients."""

    def __init__(self, model: Any, adapter: Adapter) -> None:
        """Begin with the base model, and a new adapter or one to go on from."""

    def learn(self, batch: TrainingBatch) -> None:
        """Take in a batch; its anchors say nothing."""

    def adapter(self) -> Adapter:
        """A new adapter of what was learned so far."""


def random_anchors(
    labels: torch.Tensor, count: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """At most ``count`` anchors of each sequence, ``(batch, anchors)``: columns before two labels
    at least. The last column, after which there is nothing to predict, is for those that miss.

    Args:
        labels: ``(batch, seq)``, as in :class:`TrainingBatch`.
        generator: draws them, on the labels' device; None for the default one.
    """
    real = labels != IGNORED
    fits = torch.nn.functional.pad(real[:, 1:-1] & real[:, 2:], (0, 2))
    drawn = torch.rand(labels.shape, device=labels.device, generator=generator)
    scores = drawn.masked_fill(~fits, -1.0)
    best = scores.topk(min(count, labels.shape[1]))
    columns = best.indices.masked_fill(best.values < 0, labels.shape[1] - 1)
    return columns.sort().values


class SpecTuner(BaseTuner):
    """Attaches a `SpecAdapterLayer` to a base model; `register_type` derives one class per type."""

    tuner_layer_cls = SpecAdapterLayer
    type_name: ClassVar[str]
    adapter_class: ClassVar[type[Adapter]]
    objective: ClassVar[Objective | None] = None
    num_anchors: ClassVar[int] = 64
    target_module_mapping: ClassVar[dict[str, list[str]]] = {}

    def __init__(
        self, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        model = unwrapped(model)  # a PeftModel of another type may be around it
        # PEFT gives a dict for a `PeftModel`, of which nothing but adapters is trained and saved;
        # Transformers' load_adapter and add_adapter leave a model what it is.
        self._freezes = isinstance(peft_config, dict)
        config = peft_config[adapter_name] if isinstance(peft_config, dict) else peft_config
        configs: Any = getattr(model, "peft_config", {})
        existing = configs.get(adapter_name, config)
        if existing is not config:
            kind = getattr(existing.peft_type, "value", existing.peft_type)
            raise ValueError(
                f"the model already has an adapter named {adapter_name!r}, of type {kind}: give "
                f"this one another name, such as adapter_name={type(config).type_name.lower()!r}."
            )
        with unchanged_on_error(model):
            super().__init__(model, peft_config, adapter_name, *args, **kwargs)

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Add the adapter's parameters under `model.spec_modules` (PEFT calls this)."""
        config = self.peft_config[adapter_name]
        others = self.peft_config.keys() - for_drafting(model) - {adapter_name}
        config.check_base(model)
        adapter = self.adapter_class.build(config, model, on_meta=low_cpu_mem_usage)
        layer = layer_of(model, self.type_name)
        if layer is None:
            layer = SpecAdapterLayer(self.type_name)
            layer.add_to(model)
        layer.adapters[adapter_name], adapter.name = adapter, adapter_name
        config.attached_as = adapter_name
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        # As with PEFT's types, later adapters leave the trainability of others alone.
        if not others and (self._freezes or not config.inference_mode):
            self._mark_only_adapters_as_trainable(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base model's forward; with ``anchors`` among the inputs, the training loss.

        The loss is thus part of `PeftModel.forward`, as wrappers for several devices (accelerate,
        DDP, FSDP) require. In training mode ``labels`` are enough if this adapter is all that is
        trained: anchors are then drawn at random.
        """
        if kwargs.get("anchors") is None:
            if kwargs.get("labels") is None or not self._is_all_that_is_trained():
                kwargs.pop("anchors", None)
                return super().forward(*args, **kwargs)
            kwargs["anchors"] = random_anchors(kwargs["labels"], self.num_anchors)
        name, objective = self.type_name, type(self).objective
        if objective is None:
            raise ValueError(f"adapters of type {name} are not trained with `anchors`.")
        adapter = find_active(self.model, name)
        if adapter is None:
            raise ValueError(f"no adapter of type {name} is active: call set_adapter first.")
        if adapter.config.inference_mode and self.training and torch.is_grad_enabled():
            raise ValueError(
                f"the {name} adapter {adapter.name!r} was loaded for inference: load it with "
                "is_trainable=True to train it."
            )
        # PeftModel passes on every argument of a forward, most of them None.
        given = {key: value for key, value in kwargs.items() if value is not None}
        every = given.pop("num_items_in_batch", None)
        for unused in ("use_cache", "return_dict"):
            given.pop(unused, None)
        for unknown in given.keys() - {*TrainingBatch._fields}:
            raise ValueError(
                f"{unknown} among the inputs of a training step of a {name} adapter, which takes "
                f"{', '.join(TrainingBatch._fields)}. Leave it out; sequences are not packed."
            )
        batch = TrainingBatch(*args, **given)
        found: Any = objective(self.model, adapter, batch)
        if not isinstance(found, Mapping):
            raise TypeError(
                f"the objective of {name} returned a {type(found).__name__}: return a dict with "
                "'loss', and 'logits' and 'labels' if accuracies are wanted."
            )
        if every is not None:
            # Trainer adds up what batches that are accumulated, and other processes, return: of the
            # mean over them all this one has the share of its labels.
            labels = (batch.labels[:, 1:] != IGNORED).sum()
            share = labels / torch.as_tensor(every, device=labels.device).clamp(min=1)
            found = {**found, "loss": found["loss"] * share.to(found["loss"])}
        return TrainingOutput(**found)

    def _is_all_that_is_trained(self) -> bool:
        """Whether a training step is under way in which only the active adapter learns."""
        if not self.training or not torch.is_grad_enabled() or type(self).objective is None:
            return False
        adapter = find_active(self.model, self.type_name)
        own = set() if adapter is None else {id(one) for one in adapter.parameters()}
        learn = [id(one) for one in self.model.parameters() if one.requires_grad]
        return bool(learn) and own.issuperset(learn)

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("adapters of hf_spec replace no modules")

    @classmethod
    def _get_adapter_state_dict(
        cls, model: Any, config: Any, adapter_name: str, *args: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        found = super()._get_adapter_state_dict(model, config, adapter_name, *args, **kwargs)
        layer = layer_of(unwrapped(model), cls.type_name)
        if layer is None:
            return _Complete(found)
        paths = layer.paths(adapter_name)
        own = {key: one for key, one in found.items() if key.endswith(tuple(paths))}
        # PEFT has left out all whose path holds the name of another adapter.
        held = {part for path in paths for part in (PEFT_PREFIX + path).split(".")}
        confusing = sorted(held & (model.peft_config.keys() - {adapter_name}))
        if confusing and len(own) < len(paths):
            raise ValueError(
                f"adapter {adapter_name!r} cannot be saved beside one named {confusing[0]!r}, "
                "which is a part of the names of its tensors: drop that one, "
                f"delete_adapter({confusing[0]!r}), and load it under another name."
            )
        return _Complete(own)

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return key.replace(f"{cls.prefix}adapters.{adapter_name}.", cls.prefix)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        # PEFT would skip parameters without a counterpart.
        base = unwrapped(model)
        layer = layer_of(base, cls.type_name)
        if layer is not None:
            layer.adapters[adapter_name].from_file(state_dict, placement(base).dtype)
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        # PEFT's would also turn off the modules and tokens that a LoRA has trained.
        self._own_layer.set_adapter(adapter_name, inference_mode)
        self.active_adapter = adapter_name

    def delete_adapter(self, adapter_name: str) -> None:
        layer = self._own_layer
        if adapter_name not in layer.adapters:
            raise ValueError(f"Adapter {adapter_name} does not exist")
        if adapter_name in layer.merged_adapters:
            raise ValueError(f"Adapter {adapter_name} is merged: call unmerge_adapter() first.")
        self.peft_config.pop(adapter_name, None)
        layer.delete_adapter(adapter_name)
        self.active_adapter = layer.active_adapters

    def merge_adapter(
        self, adapter_names: list[str] | None = None, safe_merge: bool = False
    ) -> None:
        """Merge hf_spec's adapter only; an error for types that do not change the base."""
        self._own_layer.merge_into(self.model, safe_merge, adapter_names)

    def unmerge_adapter(self) -> None:
        self._own_layer.unmerge_from_base()
        super().unmerge_adapter()

    @property
    def _own_layer(self) -> Any:
        layer = layer_of(self.model, self.type_name)
        if layer is None:
            raise ValueError(
                f"the model has no {self.type_name} adapter any more: unload() has taken it off. "
                "Load it again."
            )
        return layer

    def _unload_and_optionally_merge(
        self, merge: bool = True, progressbar: bool = True, safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:  # fmt: skip
        layer = layer_of(self.model, self.type_name)
        if layer is None:  # taken off already, of which PEFT's own types say nothing either
            return self.model
        if merge:
            layer.merge_into(self.model, safe_merge, adapter_names)
        layer.remove_from(self.model, keep_merged=merge)
        for name in layer.adapters:
            self.model.peft_config.pop(name, None)
        if not self.model.peft_config:
            del self.model.peft_config
        return self.model


class _Complete(dict[str, torch.Tensor]):
    """What is saved of an adapter. PEFT would add the model's embeddings where its vocabulary was
    resized, and modules that another adapter on the model has trained."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add nothing."""


class _Prefix(str):
    """The prefix of a type's parameters, in which PEFT looks for an adapter's name, to warn of it.
    Here names are removed from keys by their whole path, so that any name will do."""

    def __contains__(self, name: object) -> bool:
        return False


def register_type(
    config_class: type[SpecPeftConfig],
    adapter_class: type[Adapter],
    objective: Objective | None = None,
    num_anchors: int = 64,
) -> None:
    """Make `config_class.type_name` a PEFT type; registering the same classes again does nothing.

    Args:
        config_class: class of the config.
        adapter_class: class of the module with the parameters.
        objective: the training loss, which `PeftModel.forward` returns for batches with
            ``anchors``, or in training with ``labels``.
        num_anchors: most anchors per sequence where the batch has none.

    Raises:
        ValueError: the name is not in capitals, is taken, or breaks PEFT's mapping of keys.
    """
    name, prefix = config_class.type_name, prefix_of(config_class.type_name)
    if not re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", name) or prefix in f"{CONTAINER}.type_":
        raise ValueError(
            f"{config_class.__name__}.type_name must be capitals, digits and single underscores "
            f"(LAYER_SKIP) and no part of {CONTAINER!r}, got {name!r}."
        )
    known = PEFT_TYPE_TO_CONFIG_MAPPING.get(name)
    if known is config_class:
        return
    own, theirs = path_of(config_class), path_of(known or config_class)
    if theirs != own:  # else a reloaded module may register it again
        raise ValueError(
            f"the PEFT type {name} already belongs to {theirs}; choose another type_name for {own}."
        )
    attributes = {
        "type_name": name, "prefix": prefix, "adapter_class": adapter_class,
        "objective": None if objective is None else staticmethod(objective),
        "num_anchors": num_anchors, "__module__": __name__,
    }  # fmt: skip
    tuner_class = type(f"{name}_Tuner", (SpecTuner,), attributes)
    globals()[tuner_class.__name__] = tuner_class  # where pickle looks for it
    peft_type: Any = SpecPeftType(name)
    PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] = config_class
    PEFT_TYPE_TO_TUNER_MAPPING[peft_type] = tuner_class
    PEFT_TYPE_TO_PREFIX_MAPPING[peft_type] = _Prefix(prefix)


#: Transformers 5.24 refuses every PEFT before 0.22, which is not released yet, in ``load_adapter``,
#: ``add_adapter`` and ``set_adapter``. They work with the oldest PEFT that setup.cfg allows.
peft_integration.MIN_PEFT_VERSION = "0.21.0"


def path_of(cls: type) -> str:
    """The name of a class with its module's."""
    return f"{cls.__module__}.{cls.__qualname__}"
