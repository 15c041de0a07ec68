"""Adds low-rank updates to the weights of linear modules, or to copies of these.

A module's weight can be changed if it is a plain one in memory: not quantised, offloaded or
sharded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

#: Integers as wide as the entries of a weight, to compare bits.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Factors(NamedTuple):
    """A low-rank update.

    Attributes:
        down: A, ``(rank, in_features)``.
        up: B, ``(out_features, rank)``.
        scale: factor of their product.
    """

    down: Tensor
    up: Tensor
    scale: float


def merged(module: Any, factors: Factors) -> Tensor:
    """The weight of ``module`` with the update added."""
    weight = module.weight.data
    precise = torch.promote_types(weight.dtype, torch.float32)
    down, up = (part.to(weight.device, precise) for part in factors[:2])
    update = (up @ down) * factors.scale  # (out_features, in_features)
    if isinstance(module, Conv1D):
        update = update.T
    return (weight.to(precise) + update).to(weight.dtype)


def unmergeable(module: Any) -> str:
    """Why updates cannot be merged into a module; empty if they can."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, (nn.Linear, Conv1D)):
        return f"is a {type(module).__name__}"
    # Quantised parameters are tensor subclasses or integers; sharded ones are DTensors, or
    # DeepSpeed's, which are whole within forwards only.
    if type(weight) is not nn.Parameter or not weight.dtype.is_floating_point:
        kind = f"{type(weight).__name__} of {getattr(weight, 'dtype', None)}"
        return f"is quantised or sharded ({kind})"
    if hasattr(weight, "ds_id"):
        return "is sharded (DeepSpeed)"
    if weight.dtype.itemsize < 2:
        return f"is stored in {weight.dtype}"
    return "has no weight in memory" if weight.is_meta else ""


def check_mergeable(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Raise a ValueError unless these modules of a model have plain weights of their own."""
    parameters = (p for module in model.modules() for p in module.parameters(recurse=False))
    times = Counter(map(id, parameters))
    for name, module in modules.items():
        reason = unmergeable(module)
        if not reason and times[id(module.weight)] > 1:
            reason = "shares its weight with another module"
        if reason:
            raise ValueError(
                f"cannot merge into {name}, which {reason}: leave the update unmerged, or load the "
                "model in bfloat16 or another plain type, in memory."
            )


def bit_sum(weight: Tensor) -> int:
    """A checksum of the bits of a weight."""
    bits = weight.contiguous().view(_BITS[weight.element_size()])
    return int(bits.sum(dtype=torch.int64))
