"""What is saved of a model to which adapters of hf_spec are attached, and of these.

Transformers saves either a model or its active adapter. An adapter of hf_spec for drafting is no
part of either: the model is saved, and loaded from checkpoints, as if there were none. PEFT and
Transformers have no hooks for this, so that their methods are wrapped.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.integrations.peft import PeftAdapterMixin

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.layer import CONTAINER, for_drafting, layers_of, left_out
from hf_spec.adapters.repo_files import SHIM
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


@around(PeftModel, "save_pretrained")
def save_without_embeddings(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`PeftModel.save_pretrained`: adapters of hf_spec never include the model's embeddings, which
    PEFT adds where the vocabulary was resized.

    The folder of an adapter that is not named "default" gets no `custom_generate`: nothing looks
    for it there, and `push_to_hub` fails on folders in folders.
    """
    given = inspect.signature(original).bind(self, *args, **kwargs)
    given.apply_defaults()
    selected = given.arguments["selected_adapters"]
    known = self.peft_config
    names = list(known) if selected is None else selected
    ours = [name for name in names if isinstance(known.get(name), SpecPeftConfig)]
    others = [name for name in names if name not in ours]
    wanted = given.arguments["save_embedding_layers"]
    folder = Path(given.arguments["save_directory"])
    shims = [folder / name / SHIM for name in ours if name != "default"]
    new = [path for path in shims if not path.exists()]
    for some, embeddings in ((others, wanted), (ours, False)):
        if some:
            given.arguments.update(selected_adapters=some, save_embedding_layers=embeddings)
            original(*given.args, **given.kwargs)
    for path in new:
        if path.exists():
            path.unlink()
            path.parent.rmdir()


@around(PeftAdapterMixin, "get_adapter_state_dict")
def state_without_embeddings(
    original: Any, self: Any, adapter_name: str | None = None, *args: Any, **kwargs: Any
) -> dict[str, torch.Tensor]:
    """`PreTrainedModel.get_adapter_state_dict`: see `save_without_embeddings`."""
    state: dict[str, torch.Tensor] = original(self, adapter_name, *args, **kwargs)
    name = self.active_adapters()[0] if adapter_name is None else adapter_name
    if isinstance(self.peft_config[name], SpecPeftConfig):
        state = {key: tensor for key, tensor in state.items() if CONTAINER in key}
    return state
