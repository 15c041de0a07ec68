"""Layers for multi-token prediction that others have fine-tuned, in speculators' format.

Such files hold the layers alone, with a config that describes the model's decoder layers. What is
the model's own, its embeddings, is not read. The table of names is ``SPECULATORS`` of
:mod:`hf_spec.modeling_patches.mtp`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_spec.core.checks import MAX_BLOCKS
from hf_spec.modeling_patches.mtp import SPECULATORS, gathered
from hf_spec.tools.formats.tables import KIND, Files, Reader, check_size

#: Field with the number of layers, and prefix of all parameters of an adapter.
COUNT, LAYERS = "num_nextn_predict_layers", "layers."


def convert(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Files:
    """Fields of ``MtpConfig``, and the layers' tensors by their names in ``MtpLayers``."""
    if config.get(KIND) != "mtp":
        raise ValueError(
            f"config.json beside it does not say {KIND}='mtp': layers of a model's own checkpoint "
            "need no import, assistant_strategy='mtp' reads them"
        )
    count = config.get(COUNT)
    check_size(COUNT, count, high=MAX_BLOCKS)
    found, there = {}, set()
    for name, tensor in tensors.items():
        layer, own = SPECULATORS.parse(name, 0) or (None, None)
        there.add(layer)
        found[f"{LAYERS}{layer}.{own}"] = tensor
    if there != {*range(count or 0)}:
        raise ValueError(
            f"its config.json has {COUNT}={count}, its tensors are of layers "
            f"{', '.join(sorted(map(str, there))) or 'none'}"
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


READERS = {
    "mtp": Reader(
        lambda name: SPECULATORS.parse(name, 0) is not None, convert,
        recognizes=lambda config, _: config.get(KIND) == "mtp", share=as_the_model_has_them,
    ),
}  # fmt: skip
