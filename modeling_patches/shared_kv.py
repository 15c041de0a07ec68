"""Assistants that attend to keys and values of the model that they draft for, and have none of
their own: those of Gemma 4.

Transformers gives their forward ``shared_kv_states``: of each layer type, the keys and values of
the model's last layer of this type that has some of its own.
"""

import inspect
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_spec.modeling_patches.modules import decoder_layers, mixers
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.modeling_patches.ranks import tensor_parallel_size
from hf_spec.modeling_patches.weights import input_features


class Source(NamedTuple):
    """Where an assistant's layers of one type get their keys and values."""

    layer: int  # index of the model's layer
    window: int | None  # as of sliding-window attention; None if all tokens are seen


def takes_shared_kv(assistant: Any) -> bool:
    """Whether a model's forward is given another model's keys and values."""
    return "shared_kv_states" in inspect.signature(assistant.forward).parameters


def shared_kv_sources(model: Any, assistant: Any) -> dict[str, Source]:
    """The model's layers whose keys and values an assistant is given, by layer type.

    Raises:
        ValueError: the assistant is not one for this model.
    """
    name, own = type(assistant).__name__, type(model).__name__
    if not hasattr(assistant, "create_attention_masks"):
        raise ValueError(
            f"assistant_model={name} takes keys and values of another model, and makes its masks "
            "in a way that is not known here. Generate without assistant_strategy."
        )
    if any(parameter.is_meta for parameter in assistant.parameters()):
        raise ValueError(
            f"assistant_model={name} has offloaded weights, and its forward asks one of them for "
            "its device. Load the assistant, which is small, onto one device."
        )
    ranks = tensor_parallel_size(model)
    if ranks > 1:
        raise ValueError(
            f"assistant_model={name} attends to the keys and values of {own}, and each of the "
            f"{ranks} processes that share the model holds a part of them. Load the model in one "
            "process, or choose another strategy."
        )
    text = model.config.get_text_config(decoder=True)
    caches, layers = DynamicCache(config=text).layers, decoder_layers(model)
    kinds = getattr(text, "layer_types", None) or ()
    last = {  # a dummy stands for a layer without keys of its own
        kind: index
        for index, (kind, cache) in enumerate(zip(kinds, caches))
        if type(cache).__name__ != "DummyLayer"
    }
    width, wanted = input_features(model)[1], assistant.config.backbone_hidden_size
    wrong = [] if width == wanted else [f"it reads states of size {wanted}, and these have {width}"]
    found: dict[str, Source] = {}
    of_assistant = assistant.config.get_text_config(decoder=True).layer_types
    for kind, layer in zip(of_assistant, decoder_layers(assistant)):
        attention = mixers(layer)[0]
        index = last.get(kind)
        if index is None:
            wrong.append(f"there is no layer of type {kind!r}, whose keys it reads")
            continue
        theirs = next(iter(mixers(layers[index])), None)  # it may have one that is not known
        read, there = _shape(attention), _shape(theirs)
        if read != there:
            wrong.append(f"it reads keys {read} of type {kind!r}, and these have {there}")
        windows = (getattr(one, "sliding_window", None) for one in (attention, caches[index]))
        found[kind] = Source(index, min(filter(None, windows), default=None))
    if wrong:
        raise ValueError(
            f"assistant_model={name} is not one for this {own}: "
            f"{'; '.join(dict.fromkeys(wrong))}. Give the assistant that was made for the model."
        )
    return found


def _shape(attention: Any) -> str:
    """Heads and dimension of the keys that an attention reads, in words."""
    try:
        heads = attention.config.num_attention_heads // attention.num_key_value_groups
        return f"of {heads} heads of {attention.head_dim}"
    except AttributeError:
        return "no known shape"


def with_given_masks(assistant: Any, changes: Changes) -> None:
    """Let forwards take ``attention_mask`` as it is, one for each layer type, and run without a
    read by the host."""
    changes.instead(assistant, "create_attention_masks", lambda rows, masks, keys: masks)
    head = getattr(assistant, "masked_embedding", None)
    if head is not None:
        changes.instead(head, "forward", partial(_logits_of_likely, head))


def _logits_of_likely(head: Any, hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits of the tokens in the likeliest clusters; those of all others are 1 below the least.

    As the module does it, but for this: the least is each row's own and stays on the device.
    """
    clusters = head.centroids(hidden).topk(head.centroid_intermediate_top_k).indices
    tokens = head.token_ordering.long().view(head.num_centroids, -1)[clusters].flatten(2)
    logits = (weight[tokens] @ hidden[..., None])[..., 0]
    others = (logits.amin(-1, keepdim=True) - 1).expand(-1, -1, len(weight))
    return torch.scatter(others, -1, tokens, logits)
