"""hf_spec's adapters beside others, such as a fine-tune's LoRA, and beside a base to be saved.

They hang on the base model, whatever is around it. So a `PeftModel` of a LoRA can load them, and
one of theirs a LoRA; each type has an active adapter of its own. PEFT and Transformers refuse some
of this, or change adapters of other types on the way. The functions here wrap their methods, which
have no hooks for this; models without adapters of hf_spec pass through unchanged.
"""

import inspect
import warnings
from typing import Any

from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftModel, functional
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from transformers import PreTrainedModel
from transformers.integrations.peft import PeftAdapterMixin

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.layer import (
    CONTAINER,
    SpecAdapterLayer,
    for_drafting,
    layer_of,
    layers_of,
    left_out,
)
from hf_spec.adapters.loading import unchanged_on_error
from modeling_patches.around import around
from modeling_patches.modules import unwrapped


@around(BaseTuner, "inject_adapter")
def inject_beside(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Adding an adapter of another type: hf_spec's are not there meanwhile, as PEFT freezes a base
    with the first adapter only."""
    base = unwrapped(model)
    ours = getattr(base, CONTAINER, None)
    if ours is not None:
        delattr(base, CONTAINER)
    try:
        original(self, model, *args, **kwargs)
    finally:
        if ours is not None:
            setattr(base, CONTAINER, ours)


@around(PeftModel, "add_adapter")
def add_beside(
    original: Any, self: Any, adapter_name: str, peft_config: Any, low_cpu_mem_usage: bool = False,
    autocast_adapter_dtype: bool = True,
) -> None:  # fmt: skip
    """`PeftModel.add_adapter`: hf_spec's adapters and those of other types share a model.

    The first adapter of a type is active at once, as each type has an active adapter of its own.
    """
    same = peft_config.peft_type == self.peft_type
    if same or adapter_name in self.peft_config or not _has_ours(self, peft_config):
        original(self, adapter_name, peft_config, low_cpu_mem_usage, autocast_adapter_dtype)
        return
    base = unwrapped(self)
    tuner_class = PEFT_TYPE_TO_TUNER_MAPPING[peft_config.peft_type]
    active = _active(base, peft_config.peft_type)
    trainable = {id(one) for one in base.parameters() if one.requires_grad}
    found = {adapter_name: peft_config}
    with warnings.catch_warnings(), unchanged_on_error(base):
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        tuner: Any = tuner_class(base, found, adapter_name, low_cpu_mem_usage=low_cpu_mem_usage)
    tuner._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
    if active:  # as in PEFT, later ones are neither active nor trainable
        _choose(base, peft_config.peft_type, active)
        for parameter in base.parameters():
            parameter.requires_grad_(id(parameter) in trainable)


@around(PeftModel, "set_adapter")
def set_by_type(
    original: Any, self: Any, adapter_name: str | list[str], inference_mode: bool = False
) -> None:
    """`PeftModel.set_adapter`: choose the active adapter of each type that is named; those of other
    types stay as they are."""
    if not _has_ours(self):
        original(self, adapter_name, inference_mode)
        return
    names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
    by_type: dict[Any, list[str]] = {}
    for name in names:
        if name not in self.peft_config:
            raise ValueError(f"Adapter {name} not found.")
        by_type.setdefault(self.peft_config[name].peft_type, []).append(name)
    for peft_type, some in by_type.items():
        if len(some) > 1:
            raise ValueError(
                f"a PeftModel has one active adapter of each type, got {', '.join(some)} of "
                f"type {getattr(peft_type, 'value', peft_type)}: choose one of them."
            )
        if peft_type == self.peft_type:
            original(self, some[0], inference_mode)
        else:
            _choose(unwrapped(self), peft_type, some, inference_mode)


@around(PeftModel, "delete_adapter")
def delete_by_type(original: Any, self: Any, adapter_name: str) -> None:
    """`PeftModel.delete_adapter`: an adapter of another type than the `PeftModel`'s."""
    config = self.peft_config.get(adapter_name)
    if config is None or config.peft_type == self.peft_type or not _has_ours(self):
        original(self, adapter_name)
        return
    del self.peft_config[adapter_name]
    base, tuner = unwrapped(self), PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    layer = layer_of(base, config.peft_type)
    if layer is not None:
        layer.delete_adapter(adapter_name)
    else:
        functional.delete_adapter(base, adapter_name, tuner.prefix, tuner.tuner_layer_cls)


@around(PeftAdapterMixin, "set_adapter")
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


@around(BaseTuner, "_unload_and_optionally_merge")
def keep_ours(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`BaseTuner.unload` and `merge_and_unload`: what they remove are not hf_spec's adapters."""
    model = original(self, *args, **kwargs)
    kept = {name: one.config for layer in layers_of(model) for name, one in layer.adapters.items()}
    if kept:
        model.peft_config = kept
        if isinstance(model, PeftAdapterMixin):
            model._hf_peft_config_loaded = True
    return model


@around(PreTrainedModel, "save_pretrained")
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


def _active(base: Any, peft_type: Any) -> list[str]:
    """The active adapters of a type on a base model."""
    layer, kind = layer_of(base, peft_type), PEFT_TYPE_TO_TUNER_MAPPING[peft_type].tuner_layer_cls
    if layer is None and kind is not SpecAdapterLayer:
        layer = next((one for one in base.modules() if isinstance(one, kind)), None)
    return [] if layer is None else list(layer.active_adapters)


def _choose(base: Any, peft_type: Any, names: list[str], inference_mode: bool = False) -> None:
    """Set the active adapters of a type on a base model; those of other types stay."""
    own = layer_of(base, peft_type)
    if own is not None:
        own.set_adapter(names, inference_mode)
    else:
        kind = PEFT_TYPE_TO_TUNER_MAPPING[peft_type].tuner_layer_cls
        functional.set_adapter(base, names, inference_mode, kind)


def _has_ours(model: Any, *added: Any) -> bool:
    """Whether an adapter of hf_spec is on a `PeftModel`, or has one of the configs that are added,
    and all can share its base model: adapters that are prompts are not on it."""
    configs = [*model.peft_config.values(), *added]
    return any(isinstance(config, SpecPeftConfig) for config in configs) and not any(
        config.is_prompt_learning or config.is_adaption_prompt for config in configs
    )
