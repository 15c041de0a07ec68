"""What is saved of a model to which adapters of hf_spec are attached.

Transformers saves either a model or its active adapter. An adapter of hf_spec for drafting is no
part of either: the model is saved, and loaded from checkpoints, as if there were none.
Transformers has no hook for this, so that its method is wrapped.
"""

import inspect
from typing import Any

from transformers import PreTrainedModel

from hf_spec.adapters.layer import CONTAINER, for_drafting, layers_of, left_out
from modeling_patches.around import around


@around(PreTrainedModel, "save_pretrained")
def save_base(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`PreTrainedModel.save_pretrained`: the model without adapters of hf_spec, unless one is in
    training, or an adapter of another type is attached, by Transformers' methods.

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
