"""What a method has learned for its probes, as inputs of a forward."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_spec.modeling_patches.low_rank import LowRank


@dataclass(frozen=True)
class ProbeInputs:
    """A method's learned inputs for its probes.

    Attributes:
        embeddings: ``(kinds, hidden)`` input embedding of each probe of a group.
        front: per layer, keys and values ``(kv_heads, slots, head_dim)`` that only probes see.
        front_seen: ``(kinds, slots)`` bool, which of these slots each kind sees; None for all.
        exits: number of last layers whose hidden states are averaged for probes.
        update: update of the model's modules that applies only to probes, not to tokens.
    """

    embeddings: Tensor
    front: Sequence[tuple[Tensor, Tensor]] = ()
    front_seen: Tensor | None = None
    exits: int = 1
    update: LowRank | None = None

    @property
    def num_front(self) -> int:
        return self.front[0][0].shape[1] if self.front else 0

    def sees_front(self, kinds: Tensor) -> Tensor:
        """Which front slots probes of these kinds see: ``(*kinds.shape, slots)`` bool."""
        if self.front_seen is None:
            return torch.ones((*kinds.shape, self.num_front), dtype=torch.bool, device=kinds.device)
        return self.front_seen.to(kinds.device)[kinds]
