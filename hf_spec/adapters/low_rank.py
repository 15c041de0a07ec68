"""Low-rank updates as part of an adapter, shared by the methods that train them.

The two factors of each linear module are stored in the adapter's file under flat names derived
from the module's: `down__model__layers__0__mlp__up_proj` and `up__...`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_spec.adapters.layer import SpecAdapterLayer
from hf_spec.core.checks import check_count, check_range
from hf_spec.core.limits import MAX_ALPHA, MAX_RANK
from modeling_patches.low_rank import Factors, LowRank
from modeling_patches.modules import compiled
from modeling_patches.weights import features, held

DOWN, UP = "down__", "up__"


def check_settings(prefix: str, rank: Any, alpha: Any, target_modules: Any) -> None:
    """Raise a ValueError unless these fields of a config (``<prefix>rank`` etc.) are valid."""
    check_count(f"{prefix}rank", rank, high=MAX_RANK)
    check_range(f"{prefix}alpha", alpha, 0.0, MAX_ALPHA, open_low=True)
    names = target_modules
    listed = isinstance(names, Sequence) and all(isinstance(name, str) and name for name in names)
    if names is not None and not (listed and names):
        raise ValueError(
            f"{prefix}target_modules={names!r}: give a list of names of linear modules, a regular "
            "expression, or None for all linear modules of the decoder layers."
        )
    if isinstance(names, str):
        compiled(names)


def fresh_factors(modules: Mapping[str, nn.Module], rank: int) -> dict[str, Tensor]:
    """Initial factors by flat name, as in LoRA: random A, B = 0, so that nothing changes yet."""
    tensors = {}
    for name, module in modules.items():
        inputs, outputs = features(module) or (0, 0)
        down = torch.empty(rank, inputs)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5))
        tensors[_flat(DOWN, name)] = down
        tensors[_flat(UP, name)] = torch.zeros(outputs, rank)
    return tensors


def factors(weights: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """The factors of the linear module of this name among an adapter's parameters:
    ``(rank, inputs)`` and ``(outputs, rank)``."""
    return weights[_flat(DOWN, name)], weights[_flat(UP, name)]


class LowRankLayer(SpecAdapterLayer):
    """A layer whose adapters may have low-rank updates of the base's linear modules.

    Attributes:
        updates: by adapter; subclasses attach them, or give them to single calls.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.updates: dict[str, LowRank] = {}

    def add_updates(
        self, adapter_name: str, modules: Mapping[str, nn.Module], rank: int, alpha: float,
        only_if_active: bool,
    ) -> None:  # fmt: skip
        """Add the updates of an adapter, if it has any.

        Args:
            adapter_name: the adapter, with the parameters of `fresh_factors`.
            modules: the updated modules, by name.
            rank, alpha: the updates are scaled by alpha / rank.
            only_if_active: apply them only while the adapter is active and not disabled.
        """
        containers = {
            name: [getattr(self, self.prefix + _flat(part, name)) for part in (DOWN, UP)]
            for name in modules
        }
        if modules:
            source = _AdapterFactors(self, adapter_name, alpha / rank, only_if_active, containers)
            self.updates[adapter_name] = LowRank(modules, source)

    def delete_adapter(self, adapter_name: str) -> None:
        if adapter_name in self.updates:
            self.updates.pop(adapter_name).detach()
        super().delete_adapter(adapter_name)


@dataclass(eq=False)
class _AdapterFactors:
    """Provides `LowRank` with an adapter's current factors; can be pickled with the model.

    It only keeps the containers, as PEFT replaces the parameters in them.
    """

    layer: Any
    adapter_name: str
    scale: float
    only_if_active: bool
    containers: dict[str, list[Any]]

    def __call__(self, name: str) -> Factors | None:
        layer, adapter = self.layer, self.adapter_name
        if self.only_if_active and (layer.disable_adapters or adapter not in layer.active_adapters):
            return None
        down, up = self.containers[name]
        return Factors(held(down, adapter), held(up, adapter), self.scale)


def _flat(part: str, name: str) -> str:
    return part + name.replace(".", "__")
