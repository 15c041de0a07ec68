"""Low-rank updates as part of an adapter, shared by the methods that train them.

The two factors of each linear module are stored in the adapter's file under flat names derived
from the module's: `down__model__layers__0__mlp__up_proj` and `up__...`.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hf_spec.adapters.module import Adapter
from hf_spec.core.checks import number
from hf_spec.core.limits import MAX_ALPHA
from hf_spec.modeling_patches.low_rank import Factors, LowRank
from hf_spec.modeling_patches.modules import compiled
from hf_spec.modeling_patches.weights import features, loaded

DOWN, UP = "down__", "up__"
#: The rule of alpha.
ALPHA = number(0.0, MAX_ALPHA, open_low=True)


def check_targets(name: str, names: Any) -> None:
    """The rule of fields that name modules: raises a ValueError unless they do."""
    listed = isinstance(names, Sequence) and all(isinstance(one, str) and one for one in names)
    if not (listed and names):
        raise ValueError(
            f"{name}={names!r}: give a list of names of linear modules, a regular "
            "expression, or None for all linear modules of the decoder layers."
        )
    if isinstance(names, str):
        compiled(names)


class LowRankAdapter(Adapter):
    """An adapter with low-rank updates of linear modules of the base."""

    def hold_factors(self, modules: Mapping[str, nn.Module], rank: int, alpha: float) -> None:
        """Add the factors of updates of these modules of the base, scaled by alpha / rank, and
        `update`. As in LoRA, A is random and B = 0, so that nothing changes yet."""
        self.scale = alpha / rank
        for name, module in modules.items():
            inputs, outputs = features(module) or (0, 0)
            down = torch.empty(rank, inputs)
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))
            self.hold({_flat(DOWN, name): down, _flat(UP, name): torch.zeros(outputs, rank)})
        self.update = LowRank(modules, self.factors) if modules else None

    def factors(self, name: str) -> Factors:
        """The current update of the module of this name."""
        offloaded = getattr(self, _flat(UP, name)).is_meta
        with loaded(self) if offloaded else nullcontext():
            down, up = (getattr(self, _flat(part, name)) for part in (DOWN, UP))
        return Factors(down, up, self.scale)


def _flat(part: str, name: str) -> str:
    return part + name.replace(".", "__")
