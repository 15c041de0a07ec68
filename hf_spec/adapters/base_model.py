"""What adapters and answers record of their base model: its shape, and a short hash of its weights.

An adapter fits a base of the same shape (`check_facts`). Answers are continued by a model of the
same weights only (`fingerprint`).
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_spec.modeling_patches.modules import num_layers

#: Fields of a model's config; their names are Transformers' own.
FACTS = ("model_type", "hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size")
#: Entries per parameter that `fingerprint` reads, evenly spaced.
ENTRIES = 64


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
    """Raise a ValueError unless a model has the shape of the base that an adapter was trained for.

    Its vocabulary may have grown since, as it does by ``resize_token_embeddings``.

    Args:
        adapter: the adapter's type, such as "BITA".
        made_for: facts of its base; those that the model's config lacks are skipped.
        base: name of its base.
    """
    found = facts_of(model)
    for name, value in made_for.items():
        here = found.get(name, value)
        grew = name == "vocab_size" and isinstance(value, int) and here > value
        if here == value or grew:
            continue
        where = f" ({base})" if base else ""
        resized = f" Or add the missing tokens first: resize_token_embeddings({value})."
        raise ValueError(
            f"this {adapter} adapter was made for a model with {name}={value!r}{where}, "
            f"{type(model).__name__} has {name}={here!r}. Load it onto "
            f"{base or 'the model it was made for'}, or make one for this model."
            f"{resized if name == 'vocab_size' else ''}"
        )


def fingerprint(model: Any) -> str | None:
    """16 hex digits that tell models of other weights apart; None if weights are not in memory.

    They depend on the dtype, and not on hf_spec's adapters. Changes to entries that are not read
    (all but :data:`ENTRIES` of each parameter), or to quantized weights, are not detected.
    """
    digest = hashlib.sha256(repr(facts_of(model)).encode())
    for name, parameter in model.named_parameters():
        # Quantized parameters are subclasses that not every operation works for.
        if name.startswith("spec_modules.") or type(parameter) is not nn.Parameter:
            continue
        if parameter.is_meta:  # as those are that accelerate has offloaded
            return None
        flat = parameter.detach().flatten()
        entries = flat[:: -(-len(flat) // ENTRIES) or 1].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + entries.numpy().tobytes())
    return digest.hexdigest()[:16]


def check_read_layers(model: nn.Module, layers: Sequence[int]) -> None:
    """Raise a ValueError if a published drafter reads the states of the base's last layer, by the
    numbers of ``output_hidden_states``."""
    last = num_layers(model)
    if last in layers:
        raise ValueError(
            f"it reads states {list(layers)} of {type(model).__name__}, which has {last} layers. "
            "Those of the last one are before the final norm in some programs, after it in others, "
            "and config.json does not say which. Take a drafter that reads earlier layers only"
        )
