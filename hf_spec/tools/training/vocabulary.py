"""The draft vocabulary of an adapter that is about to be trained."""

from collections.abc import Iterable, Sequence

from torch import nn

from hf_spec.adapters.layer import layers_of
from hf_spec.adapters.predicting import VOCABULARY, vocab_size
from hf_spec.drafting.draft_vocabulary import common_tokens
from hf_spec.modeling_patches.modules import unwrapped


def set_vocabulary(model: nn.Module, answers: Iterable[Sequence[int]]) -> None:
    """Let adapters that draft from a part of the vocabulary draft the commonest tokens of answers.

    Until then these are the tokens of the smallest ids. Call it after the adapter is attached and
    before it is trained; adapters that draft all tokens, or were loaded for inference, stay as they
    are.

    Args:
        model: a ``PeftModel``, or a model with adapters.
        answers: token ids of each answer.
    """
    base = unwrapped(model)
    active = [
        layer.adapters[name]
        for layer in layers_of(base)
        for name in layer.active_adapters
        if name in layer.adapters and not layer.adapters[name].config.inference_mode
    ]
    for adapter in active:
        if (tokens := adapter.tensors().get(VOCABULARY)) is not None:
            adapter.set_vocabulary(common_tokens(answers, len(tokens), vocab_size(base)), base)
