"""What drafters with an assistant model have in common: the two models' tokenizer."""

from __future__ import annotations

from typing import Any

import torch

from hf_spec.drafting.forward_drafter import ForwardDrafter, GrowOptions
from hf_spec.drafting.options import key_of
from hf_spec.modeling_patches.weights import input_features, placement, vocabulary

#: Rows by which the embeddings of models with the same tokenizer may differ: some are padded.
PADDING = 1024


class AssistantDrafter(ForwardDrafter):
    """An assistant model drafts.

    Args:
        assistant: the causal language model that drafts.

    Raises:
        ValueError: it is not a model, or has another tokenizer.
    """

    options: GrowOptions

    def __init__(self, model: Any, options: GrowOptions, assistant: Any):
        super().__init__(model, options, ("draft_model", key_of(options)), owner=assistant)
        if not hasattr(assistant, "get_input_embeddings"):
            raise ValueError(
                f"assistant_model={assistant!r}: give a loaded model, such as "
                "AutoModelForCausalLM.from_pretrained returns."
            )
        if not hasattr(assistant, "generate"):
            raise ValueError(
                f"assistant_model={type(assistant).__name__} does not generate by itself. If it is "
                "a released drafter, make an adapter of it: hf-spec import REPOSITORY --model M "
                "--output drafter/"
            )
        _check_tokenizer(model, assistant)
        self.assistant, self.beside = assistant, (assistant,)
        known, wanted = vocabulary(assistant), vocabulary(model)
        #: Tokens that both models have.
        self.shared = min(known, wanted)
        if self.shared != wanted:
            self.token_ids = torch.arange(self.shared, device=placement(assistant).device)


def _check_tokenizer(model: Any, assistant: Any) -> None:
    """Raise a ValueError if two models cannot have the same tokenizer, by their configs."""
    known, wanted = input_features(assistant)[0], input_features(model)[0]
    other = [f"{wanted} and {known} tokens"] if abs(wanted - known) >= PADDING else []
    for name in ("bos_token_id", "eos_token_id"):
        own, theirs = _special(model, name), _special(assistant, name)
        if own and theirs and not own & theirs:
            other.append(f"{name} {sorted(own)} and {sorted(theirs)}")
    if other:
        raise ValueError(
            f"assistant_model={type(assistant).__name__} has another tokenizer than "
            f"{type(model).__name__}: {'; '.join(other)}. Give an assistant of the same family, or "
            "generate without assistant_strategy: Transformers translates between tokenizers."
        )


def _special(model: Any, name: str) -> set[int]:
    """The ids of a special token, of which models may have several."""
    found: set[int] = set()
    for config in (model.config.get_text_config(decoder=True), model.generation_config):
        value = getattr(config, name, None)
        found |= set() if value is None else {value} if isinstance(value, int) else {*value}
    return found
