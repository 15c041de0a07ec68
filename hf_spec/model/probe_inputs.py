"""What a method has learned for its probes, as inputs of a forward."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from modeling_patches.low_rank import LowRank


@dataclass(frozen=True)
class ProbeInputs:
    """A method's learned inputs for its probes.

    Attributes:
        embeddings: ``(kinds, hidden)`` input embedding of each probe of a group.
        front: per layer, keys and values ``(kv_heads, slots, head_dim)`` that only probes see.
        update: update of the model's modules that applies only to probes, not to tokens.
    """

    embeddings: Tensor
    front: Sequence[tuple[Tensor, Tensor]] = ()
    update: LowRank | None = None

    @property
    def num_front(self) -> int:
        return self.front[0][0].shape[1] if self.front else 0
