"""Groups of probes: nodes with a learned embedding that ask the model for a future token.

BiTA's and SPACE's mask tokens and PPD's prompt tokens are probes. A *group* of probes is attached
to a node of the tree (:meth:`hf_spec.core.tree.Tree.attach_probes`). A probe sees what the node
sees, and some probes of its own group; only its group sees a probe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hf_spec.core.transfer import sent


@dataclass(frozen=True)
class ProbeGroup:
    """The probes of one node; probe ``i`` carries the ``i``-th learned embedding.

    Args:
        offsets: positions after the node, from 1; a probe at offset d predicts the token at d + 1.
        visible: ``visible[q][k]``: probe q attends to probe k of its group.

    Raises:
        ValueError: if an offset is below 1, or a probe does not see itself.
    """

    offsets: tuple[int, ...]
    visible: tuple[tuple[bool, ...], ...]

    def __post_init__(self) -> None:
        size = len(self.offsets)
        if min(self.offsets, default=1) < 1:
            raise ValueError(f"offsets={self.offsets}: a probe stands behind its node, from 1.")
        square = len(self.visible) == size and all(len(row) == size for row in self.visible)
        if not square or not all(self.visible[i][i] for i in range(size)):
            raise ValueError(
                f"visible must be {size} x {size} for {size} probes, with True on the diagonal."
            )

    def __len__(self) -> int:
        return len(self.offsets)

    @staticmethod
    @lru_cache(maxsize=64)
    def causal(size: int) -> ProbeGroup:
        """One probe per offset 1 .. ``size``, each seeing those before it."""
        rows = tuple(tuple(k <= q for k in range(size)) for q in range(size))
        return ProbeGroup(tuple(range(1, size + 1)), rows)


@lru_cache(maxsize=64)
def group_tensors(group: ProbeGroup, device: str) -> tuple[Tensor, Tensor]:
    """A group's offsets ``(size,)`` int64 and visibility ``(size, size)`` bool on a device."""
    offsets = sent(group.offsets, device, torch.long)
    visible = sent(group.visible, device, torch.bool)
    return offsets, visible.reshape(len(group), len(group))
