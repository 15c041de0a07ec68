"""Checks whether a model can be decoded with trees, before any work is done."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import DynamicCache

from hf_spec.modeling_patches.linear_attention import recurrent_rules
from hf_spec.modeling_patches.modules import CACHE, takes
from hf_spec.modeling_patches.weights import placement, tensor_parallel_size

#: Architectures whose tree forward is tested against plain generation.
VERIFIED = frozenset(
    {"cohere2", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode",
     "gpt_neox", "gptj", "llama", "mistral", "mixtral", "olmo2", "opt", "phi", "phi3",
     "qwen2", "qwen3", "stablelm", "starcoder2"}
)  # fmt: skip

#: Kinds of cache layers that a tree runs through.
LAYERS = frozenset(
    {"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer",
     "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"}
)  # fmt: skip

#: By model type, what goes by the slots of the cache.
_COUNTS_SLOTS = {
    "falcon": "ALiBi", "gpt_neo": "local attention", "inkling_text": "relative attention",
}  # fmt: skip

_OTHER_ADAPTERS = (
    "Choose an adapter without it: prompt_depth='none' for BITA, num_prefix_tokens=0 for PPD, or "
    "another type."
)


def check_model(model: Any) -> None:
    """Check that a model is a decoder whose cache can be rolled back token by token.

    Raises:
        ValueError: it is not; the message names the architecture and the reason.
    """
    if (obstacle := next(_obstacles(model), None)) is not None:
        name = type(model).__name__
        raise ValueError(f"{name}{obstacle}. Generate without assistant_strategy.")


def _obstacles(model: Any) -> Iterator[str]:
    """Reasons against a model, worded to follow its name in an error."""
    if model.config.is_encoder_decoder:
        yield " is an encoder-decoder model: strategies decode decoder-only models"
    text = model.config.get_text_config(decoder=True)
    looks_ahead = any(getattr(module, "is_causal", True) is False for module in model.modules())
    if getattr(text, "is_decoder", None) is False and looks_ahead:  # BERT's family
        yield (
            " is an encoder (is_decoder=False in its config): each token sees those behind it, and "
            "there is no KV cache. To make it a decoder, load it with is_decoder=True"
        )
    layers = DynamicCache(config=text).layers
    yield from _in_states(model, layers)
    yield from _in_caches(model, text, [type(layer).__name__ for layer in layers])
    attends = any(hasattr(layer, "keys") for layer in layers)
    if attends and not takes(model, "position_ids"):
        yield ".forward takes no position_ids, so siblings in a tree cannot share a position"
    slots = _COUNTS_SLOTS.get(text.model_type)
    if slots and getattr(text, "alibi", True):
        yield f": its {slots} counts slots of the cache, which siblings in a tree cannot share"


def _in_states(model: Any, layers: Sequence[Any]) -> Iterator[str]:
    try:
        known = set(recurrent_rules(model))
    except ValueError as error:
        yield f": {error}"
        return
    states = {index for index, layer in enumerate(layers) if hasattr(layer, "conv_states")}
    own_cache = not model._supports_default_dynamic_cache()
    if states - known or (not known and (getattr(model, "_is_stateful", False) or own_cache)):
        yield " keeps a recurrent state in a way that is not written for trees"


def _in_caches(model: Any, text: Any, kinds: Sequence[str]) -> Iterator[str]:
    if unknown := [kind for kind in kinds if kind not in LAYERS]:
        yield (
            f" has a cache layer of type {unknown[0]}, which cannot forget rejected tokens or "
            "takes no tree mask"
        )
    for module in model.modules() if "DynamicIndexedLayer" in kinds else ():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "indexer_position_ids" in code.co_names:
            yield (
                f": {type(module).__name__} keeps positions of its own beside the index of the "
                "cache, which cannot forget rejected tokens"
            )
    chunked = getattr(text, "attention_chunk_size", None) is not None
    if chunked and "chunked_attention" not in (getattr(text, "layer_types", None) or ()):
        yield " has chunked attention in layers that its config does not name in layer_types"
    if not takes(model, CACHE):
        yield (
            f".forward takes no {CACHE} by name: it has no KV cache, or hides it in **kwargs (then "
            f"name {CACHE} and position_ids in its signature)"
        )


def activated_loras(model: Any) -> list[str]:
    """Names of the active adapters that are PEFT's activated LoRA."""
    found = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and not module.disable_adapters:
            variants = getattr(module, "lora_variant", {})
            kinds = {name: type(variants.get(name)).__name__ for name in module.active_adapters}
            found |= {name for name, kind in kinds.items() if kind.startswith("ALora")}
    return sorted(found)


def averaging_adapters(model: Any) -> list[str]:
    """Names of the active adapters that are PEFT's Lily, whose experts are weighted by a mean over
    all tokens of a forward."""
    found = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and not module.disable_adapters:
            found |= {*getattr(module, "lily_router", {})} & {*module.active_adapters}
    return sorted(found)


def check_length(model: Any, length: int) -> None:
    """Check that a model can be decoded exactly up to so many tokens, prompts included.

    Raises:
        ValueError: it cannot; the message names the limit.
    """
    name, text = type(model).__name__, model.config.get_text_config(decoder=True)
    keep = getattr(text, "keep_window_size", None)
    if keep is not None and length > keep:
        raise ValueError(
            f"{name} keeps keep_window_size={keep} keys, and which of equal ones depends on how "
            "many there are, draft tokens included: prompt and max_new_tokens make "
            f"{length} tokens. Lower max_new_tokens, or generate without assistant_strategy."
        )
    # Beyond, Llama 4 scales queries by their slots of the cache. Static caches have twice as many
    # slots as tokens at most, and draft tokens are in the last ones.
    if text.model_type == "llama4_text" and text.attn_temperature_tuning:
        most = text.floor_scale // 2 - 64
        if length > most:
            raise ValueError(
                f"{name} with attn_temperature_tuning: its scale of queries counts slots of the "
                f"cache, so that strategies go up to {most} tokens, and prompt and max_new_tokens "
                f"make {length}. Lower max_new_tokens, or generate without assistant_strategy."
            )


def checkpoints(model: Any) -> bool:
    """Whether activations are recomputed in the backward pass."""
    return any(
        getattr(module, "gradient_checkpointing", False) and module.training
        for module in model.modules()
    )


@torch.no_grad()
def check_cache_stays(model: Any) -> None:
    """Check that a model in training does not drop its cache for gradient checkpointing.

    Transformers before 5.24 does so, and some models still do: plain generation then computes each
    token from the one before it alone. One token is run to find out.

    Raises:
        ValueError: it does.
    """
    if checkpoints(model) and not one_token(model).get_seq_length():
        raise ValueError(
            f"{type(model).__name__} is in training mode with gradient checkpointing, in which it "
            "drops its cache: each token would be computed from the one before it alone. Call "
            "model.eval() or model.gradient_checkpointing_disable() before generating."
        )


def empty_cache(model: Any) -> DynamicCache:
    """What ``generate`` gives to the first forward."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def one_token(model: Any) -> DynamicCache:
    """The cache after a token has run."""
    cache = empty_cache(model)
    token = torch.zeros(1, 1, dtype=torch.long, device=placement(model).device)
    model(input_ids=token, use_cache=True, **{CACHE: cache})
    return cache


@torch.no_grad()
def kv_shape(model: Any) -> tuple[int, int, int]:
    """Layers, key-value heads and head dimension of the model's cache, found by running one token.

    It also works for a model that is entirely on the meta device.

    Raises:
        ValueError: some weights are not loaded, a layer stores no KV, or the shapes of layers, or
            of keys and values, differ.
    """
    check_model(model)
    name = type(model).__name__
    on_meta = placement(model).device.type == "meta"
    if on_meta and not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{name} has no weights: load it before the adapter.")
    cache = one_token(model)
    without = [i for i, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is None]
    if without:
        raise ValueError(
            f"layers {without} of {name} have no KV of their own, and prefix KV is for every "
            f"layer. {_OTHER_ADAPTERS}"
        )
    shapes = {part.shape for layer in cache.layers for part in (layer.keys, layer.values)}
    if len(shapes) != 1:
        raise ValueError(
            f"{name} has KV of several shapes ({sorted(map(tuple, shapes))}), and prefix KV is of "
            f"one. {_OTHER_ADAPTERS}"
        )
    _, heads, _, dim = shapes.pop()
    return len(cache.layers), heads * tensor_parallel_size(model), dim


def check_unquantized(model: Any, what: str, remedy: str) -> None:
    """Check that ``what`` may change a model's weights; ``remedy`` is the alternative.

    Raises:
        ValueError: the weights are quantized.
    """
    given = getattr(model.config, "quantization_config", None)
    method = given.get("quant_method") if isinstance(given, dict) else given and given.quant_method
    # Quantized parameters are tensor subclasses, or have a small dtype.
    kinds = [str(getattr(method, "value", method))] * (given is not None) + [
        f"{type(parameter).__name__}, {parameter.dtype}"
        for parameter in model.parameters()
        if not type(parameter).__module__.startswith("torch.")
        or not parameter.is_floating_point()
        or parameter.dtype.itemsize < 2
    ]
    if kinds:
        raise ValueError(
            f"{what} changes the weights of the base model, and those of this "
            f"{type(model).__name__} are quantized ({kinds[0]}): load it unquantized, or choose "
            f"{remedy}."
        )
