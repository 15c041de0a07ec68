"""Identifies a base model by its shape and a short hash of its weights.

Facts describe shapes: if they differ, an adapter does not fit. The fingerprint describes weights:
if only it differs (a fine-tuned base), the adapter fits but may draft worse. It reads a few entries
of each parameter, so it is cheap for models of any size.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

logger = logging.getLogger(__name__)

#: Entries read per parameter, evenly spaced.
ENTRIES = 64
#: Types that are compared after rounding to bfloat16; all others are quantised formats.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: What the config says about the shape of the model.
CONFIG_FACTS = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
#: Attribute in which PEFT's wrapper modules keep the wrapped module, by type of wrapper.
WRAPPED: tuple[tuple[type, str], ...] = (
    (BaseTunerLayer, "base_layer"),
    (AuxiliaryTrainingWrapper, "original_module"),
)


def fingerprint(model: Any, tokens: int | None = None) -> str | None:
    """16 hex digits that identify the base weights of ``model``, or None if it has none in memory.

    Entries are rounded to bfloat16 before they are hashed: a checkpoint in bfloat16 or float32 has
    the same fingerprint whether it is loaded in bfloat16, float32 or float64, on any device.
    (float16 cannot hold all values of the others; loading in it may change the fingerprint.)
    Adapters of PEFT, attached, active or not, do not count; merging one into the weights does.
    Quantised parameters are skipped, so that a quantised model has a fingerprint of its own, made
    from its embeddings, norms and whatever else stays in floating point.

    Equal fingerprints do not prove that models are equal: changes to entries that are not read, or
    smaller than bfloat16's rounding, are not detected.

    Args:
        model: a causal language model, or a PEFT or ``torch.compile`` wrapper around one.
        tokens: leave out the embeddings of all but the first tokens, so that a model whose
            vocabulary grew has the fingerprint from before; None for all.

    Returns:
        None if weights are on the meta device, as those are that accelerate has offloaded.
    """
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    found: dict[str, Tensor] = dict(_base_parameters(model))
    config = model.config.get_text_config()
    facts = {name: getattr(config, name, None) for name in CONFIG_FACTS}
    if tokens is not None:
        size, facts["vocab_size"] = facts["vocab_size"], tokens
        for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
            by_token = {id(part) for _, part in _base_parameters(embeddings or nn.Module())}
            for name, parameter in found.items():
                if id(parameter) in by_token and parameter.shape[0] == size:
                    found[name] = parameter[:tokens]
    if any(parameter.is_meta for parameter in found.values()):
        return None
    digest = hashlib.sha256()
    digest.update(repr(list(facts.values())).encode())
    for name, parameter in sorted(found.items()):
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(_entries(parameter).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _base_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """The base's floating-point parameters under the names that they have without adapters.

    Tied parameters come under each of their names, so untying them changes nothing.
    """
    for kind, attribute in WRAPPED:
        if isinstance(module, kind):
            # hf_spec's layers wrap nothing.
            inner = getattr(module, attribute, None)
            if inner is not None:
                yield from _base_parameters(inner, prefix)
            return
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        # Quantised parameters have another dtype or are tensor subclasses.
        if type(parameter) is nn.Parameter and parameter.dtype in DTYPES:
            yield prefix + name, parameter
    for name, child in module.named_children():
        yield from _base_parameters(child, f"{prefix}{name}.")


def _entries(parameter: Tensor) -> Tensor:
    """At most :data:`ENTRIES` entries of ``parameter``: ``(entries,)`` bfloat16 on the CPU."""
    size = parameter.numel()
    count = min(size, ENTRIES)
    # The middle of each of ``count`` equal stretches.
    middles = [(2 * i + 1) * size // (2 * count) for i in range(count)]
    flat = torch.tensor(middles, dtype=torch.long, device=parameter.device)
    places = torch.unravel_index(flat, parameter.shape)
    return parameter.detach()[places].to(torch.bfloat16).cpu()


# -- facts ---------------------------------------------------------------------------------------

#: Fields of a model's config; their names are Transformers' own.
FACTS = ("model_type", "hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size")


def facts_of(model: Any) -> dict[str, Any]:
    """`FACTS` of a causal language model, without those that its config lacks."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return {}
    config = config.get_text_config()
    found = {name: getattr(config, name, None) for name in FACTS}
    # Falcon has a name of its own; without grouped queries there are as many as heads.
    for other in ("num_kv_heads", "num_attention_heads"):
        if found["num_key_value_heads"] is None:
            found["num_key_value_heads"] = getattr(config, other, None)
    return {name: value for name, value in found.items() if value is not None}


def check_facts(adapter: str, made_for: dict[str, Any], base: str | None, model: Any) -> None:
    """Check that a model has the shape of the base that an adapter was trained for.

    Its vocabulary may have grown since, as it does by ``resize_token_embeddings``.

    Args:
        adapter: the adapter's type, such as "BITA".
        made_for: facts of its base; those that the model's config lacks are skipped.
        base: name of its base.
        model: the model.

    Raises:
        ValueError: a fact differs; the message names the first one.
    """
    found = facts_of(model)
    for name, value in made_for.items():
        if name == "vocab_size" and grew(made_for, model):
            continue
        if name in found and found[name] != value:
            where = f" ({base})" if base else ""
            resized = f" Or add the missing tokens first: resize_token_embeddings({value})."
            raise ValueError(
                f"this {adapter} adapter was made for a model with {name}={value!r}{where}, "
                f"{type(model).__name__} has {name}={found[name]!r}. Load it onto "
                f"{base or 'the model it was made for'}, or make one for this model."
                f"{resized if name == 'vocab_size' else ''}"
            )


def grew(made_for: Mapping[str, Any], model: Any) -> bool:
    """Whether a model has more tokens than the base that an adapter was trained for."""
    before, now = made_for.get("vocab_size"), facts_of(model).get("vocab_size")
    return isinstance(before, int) and isinstance(now, int) and before < now


@functools.cache  # once per adapter and model, however often they meet
def warn_of_other_weights(adapter: str, base: str | None, made_for: str, found: str) -> None:
    """Log that a base model of the right shape has other weights."""
    logger.warning(
        "this %s adapter was trained on other weights than this model has (%s: fingerprint %s, "
        "here %s; quantised and float16 weights count as others): candidates may be accepted less "
        "often; outputs stay exact.",
        adapter, base or "its base model", made_for, found,
    )  # fmt: skip
