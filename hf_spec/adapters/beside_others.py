"""hf_spec's adapters beside others, such as a fine-tune's LoRA, and beside a base to be saved.

They hang on the base model, whatever is around it, such as a `PeftModel` of a LoRA; each type has
an active adapter of its own. PEFT and Transformers refuse some of this, or change adapters of other
types on the way. The functions here wrap their methods, which have no hooks for this; models
without adapters of hf_spec pass through unchanged.
"""

import inspect
from typing import Any

from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from transformers import PreTrainedModel
from transformers.integrations.peft import PeftAdapterMixin

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.layer import (
    CONTAINER,
    SpecAdapterLayer,
    for_drafting,
    layers_of,
    left_out,
)
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.patch_method import patch_method


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
