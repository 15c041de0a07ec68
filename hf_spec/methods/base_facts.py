"""What an adapter remembers of the base model it was trained on, and the check against another.

Facts are about shapes: an adapter does not fit where they differ. The fingerprint is about weights:
where only it differs (a fine-tuned base), the adapter fits but may draft worse.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from hf_spec.core.limits import MAX_SHAPE
from hf_spec.methods.base import check_count
from modeling_patches.support import kv_shape

logger = logging.getLogger(__name__)

#: Fields of a model's config; their names are Transformers' own.
FACTS = ("model_type", "hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size")


def facts_of(model: Any) -> dict[str, Any]:
    """`FACTS` of a causal language model, without those that its config does not tell."""
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
    """Raise unless `model` has the facts of the base that an adapter was made for.

    Args:
        adapter: the adapter's type, "BITA".
        made_for: facts of its base; ones that the model's config does not tell are passed over.
        base: the base's name.

    Raises:
        ValueError: naming the first fact that differs.
    """
    found = facts_of(model)
    for name, value in made_for.items():
        if name in found and found[name] != value:
            where = f" ({base})" if base else ""
            raise ValueError(
                f"this {adapter} adapter was made for a model with {name}={value!r}{where}, "
                f"{type(model).__name__} has {name}={found[name]!r}. Load it onto "
                f"{base or 'the model it was made for'}, or make one for this model."
            )


def check_recorded(config: Any) -> None:
    """Raise ValueError unless what a config has recorded of the base's cache are sizes."""
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        if getattr(config, name) is not None:
            check_count(name, getattr(config, name), high=MAX_SHAPE)


def record_shape(config: Any, model: Any) -> None:
    """Record the shape of the base's cache, unless an adapter that is loaded brings it along."""
    if not (config.inference_mode and config.num_layers):
        config.num_layers, config.num_kv_heads, config.head_dim = kv_shape(model)


@functools.cache  # once per adapter and model, however often they meet
def warn_of_other_weights(adapter: str, base: str | None, made_for: str, found: str) -> None:
    """Log that a base of the right shape has other weights."""
    logger.warning(
        "this %s adapter was trained on other weights than this model has (%s: fingerprint %s, "
        "here %s; quantised and float16 weights count as others): candidates may be accepted less "
        "often; outputs stay exact.",
        adapter, base or "its base model", made_for, found,
    )  # fmt: skip
