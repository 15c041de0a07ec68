"""Layers for multi-token prediction that others have fine-tuned, in speculators' format.

Such files hold the layers alone, with a config that describes the model's decoder layers. What is
the model's own, its embeddings, is not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from hf_spec.core.checks import check_count
from hf_spec.core.limits import MAX_BLOCKS
from hf_spec.methods.mtp.weights import gathered
from hf_spec.methods.registry import Published
from modeling_patches.mtp import SPECULATORS

KIND = "mtp"
#: Prefix of all parameters of an adapter.
LAYERS = "layers."


def wants(name: str) -> bool:
    return SPECULATORS.parse(name, 0) is not None


def recognizes(config: Mapping[str, Any], names: Collection[str]) -> bool:
    return config.get("speculators_model_type") == KIND


def convert(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of ``MtpConfig``, and the layers' tensors by their names in ``MtpLayers``.

    Raises:
        ValueError: it is not in speculators' format, or has other layers than its config says.
    """
    if not recognizes(config, tensors):
        raise ValueError(
            f"config.json beside it does not say speculators_model_type={KIND!r}: layers of "
            "a model's own checkpoint need no import, assistant_strategy='mtp' reads them"
        )
    count = config.get("num_nextn_predict_layers")
    check_count("num_nextn_predict_layers in config.json", count, high=MAX_BLOCKS)
    found = {}
    for name, tensor in tensors.items():
        layer, own = SPECULATORS.parse(name, 0) or (None, None)
        found[f"{LAYERS}{layer}.{own}"] = tensor
    there = {name.split(".")[1] for name in found}
    if there != {str(layer) for layer in range(count or 0)}:
        raise ValueError(
            f"its config.json has num_nextn_predict_layers={count}, its tensors are of layers "
            f"{', '.join(sorted(there)) or 'none'}"
        )
    return {"num_layers": count, "sparse": any(".experts." in name for name in found)}, found


def as_the_model_has_them(
    model: Any, config: Any, weights: dict[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """The same with the tensors of blocks as the model's classes want them, with experts stacked,
    say."""
    sources = {}
    for name in weights:
        layer, own = name.removeprefix(LAYERS).split(".", 1)
        sources[int(layer), own] = name
    found = gathered(model, sources, weights.__getitem__)
    return config, {f"{LAYERS}{name}": tensor for name, tensor in found.items()}


PUBLISHED = Published(wants, convert, recognizes=recognizes, share=as_the_model_has_them)
