"""Which models can be decoded with a tree, told before any work is done."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache

from modeling_patches import alibi
from modeling_patches.ranks import tensor_parallel_size

#: Architectures whose tree forward is tested against plain generation.
VERIFIED = frozenset(
    {"bloom", "cohere2", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo",
     "gpt_neox", "gptj", "llama", "mistral", "mixtral", "mpt", "olmo2", "opt", "phi", "phi3",
     "qwen2", "qwen3", "stablelm", "starcoder2"}
)  # fmt: skip

_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}


def sliding_windows(model: Any) -> list[int | None]:
    """Attention window of each layer, None for full attention."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return [
        layer.sliding_window if getattr(layer, "is_sliding", False) else None for layer in layers
    ]


def check_model(model: Any) -> None:
    """Raise unless the model is a decoder whose cache can be rolled back token by token.

    Raises:
        ValueError: naming the architecture and what is in the way.
    """
    name = type(model).__name__
    remedy = "Generate without assistant_strategy."
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder model: strategies decode decoder-only models. {remedy}"
        )
    if getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():
        raise ValueError(
            f"{name} keeps a recurrent state, which cannot forget rejected tokens. {remedy}"
        )
    text = model.config.get_text_config(decoder=True)
    for layer in DynamicCache(config=text).layers:
        if type(layer).__name__ not in _LAYERS:
            raise ValueError(
                f"{name} has a cache layer of type {type(layer).__name__}, which cannot forget "
                f"rejected tokens or takes no tree mask. {remedy}"
            )
    if getattr(text, "attention_chunk_size", None) is not None:
        raise ValueError(f"{name} uses chunked attention, which takes no tree mask. {remedy}")
    forward = inspect.signature(model.forward).parameters
    if "position_ids" not in forward and text.model_type not in alibi.MODEL_TYPES:
        raise ValueError(
            f"{name}.forward takes no position_ids, so siblings in a tree cannot share a position. "
            f"{remedy}"
        )


@torch.no_grad()
def kv_shape(model: Any) -> tuple[int, int, int]:
    """Layers, key-value heads and head dimension of the model's cache, by running one token.

    Raises:
        ValueError: if the weights are not loaded, or layers or keys and values differ in shape.
    """
    weight = model.get_input_embeddings().weight
    if weight.device.type == "meta":
        raise ValueError(f"{type(model).__name__} has no weights: load it before the adapter.")
    cache = DynamicCache()
    token = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
    model(input_ids=token, past_key_values=cache, use_cache=True)
    shapes = {part.shape for layer in cache.layers for part in (layer.keys, layer.values)}
    if len(shapes) != 1:
        raise ValueError(
            f"{type(model).__name__} has keys and values of several shapes "
            f"({sorted(tuple(shape) for shape in shapes)}): learned states in every layer need one."
        )
    _, heads, _, dim = shapes.pop()
    return len(cache.layers), heads * tensor_parallel_size(model), dim


def quantised_as(model: Any) -> str | None:
    """How the model's weights are quantised, in a word; None if they are plain floating point."""
    given = getattr(model.config, "quantization_config", None)
    if given is not None:
        method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
        return str(getattr(method, "value", method))
    for parameter in model.parameters():
        # Quantisers' parameters are of classes of their own, or hold small numbers.
        foreign = not type(parameter).__module__.startswith("torch.")
        if foreign or not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            return f"{type(parameter).__name__}, {parameter.dtype}"
    return None


def check_unquantised(model: Any, what: str, remedy: str) -> None:
    """Raise unless the model's weights can be changed.

    Args:
        what: what would change them, for the error.
        remedy: what else to choose.

    Raises:
        ValueError: they are quantised.
    """
    found = quantised_as(model)
    if found is not None:
        raise ValueError(
            f"{what} changes the weights of the base model, and those of this "
            f"{type(model).__name__} are quantised ({found}): load it unquantised, or choose "
            f"{remedy}."
        )
