"""``draft_model``: another, smaller model with the same tokenizer drafts.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), with trees
that grow level by level as in EAGLE-2 (Li et al., 2024, section 4.1).
"""

from __future__ import annotations

from typing import Any

from hf_spec.drafting.forward_drafter import GrowOptions
from hf_spec.methods.draft_model.assistant import AssistantDrafter
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.draft_model.shared_kv import SharedKVDrafter
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.shared_kv import takes_shared_kv


def make(model: Any, options: GrowOptions, assistant: Any) -> AssistantDrafter:
    """The drafter for an assistant: by what its forward takes.

    Raises:
        ValueError: the assistant is none, or none that drafts for this model.
    """
    if getattr(getattr(assistant, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"assistant_model={type(assistant).__name__} of type "
            f"{assistant.active_peft_config.peft_type.value}: its adapter puts virtual tokens into "
            "the cache. Give the model without it: assistant_model=assistant.get_base_model()."
        )
    assistant = unwrapped(assistant)
    shares = hasattr(assistant, "forward") and takes_shared_kv(assistant)
    return (SharedKVDrafter if shares else DraftModelDrafter)(model, options, assistant)


METHOD = Method(
    name="draft_model",
    summary="a smaller model with the same tokenizer drafts: generate(assistant_model=...)",
    options=GrowOptions,
    drafter=DraftModelDrafter,
    needs_assistant=True,
    make=make,
)
