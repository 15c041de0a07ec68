"""Groups of probes: nodes with a learned embedding that ask the model for a future token.

BiTA's and SPACE's mask tokens and PPD's prompt tokens are probes. A *group* of probes is attached
to a node of the tree (:meth:`hf_spec.core.tree.Tree.attach_probes`). A probe sees what the node
sees, and some probes of its own group; only its group sees a probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class ProbeGroup:
    """The probes of one node; probe ``i`` carries the ``i``-th learned embedding.

    Args:
        offsets: positions after the node, from 1; a probe at offset d predicts the token at d + 1.
        visible: ``visible[q][k]``: probe q attends to probe k of its group, and to itself.
    """

    offsets: tuple[int, ...]
    visible: tuple[tuple[bool, ...], ...]

    def __len__(self) -> int:
        return len(self.offsets)

    @staticmethod
    @lru_cache(maxsize=64)
    def causal(size: int) -> ProbeGroup:
        """One probe per offset 1 .. ``size``, each seeing those before it."""
        rows = tuple(tuple(k <= q for k in range(size)) for q in range(size))
        return ProbeGroup(tuple(range(1, size + 1)), rows)


class ProbeLayout(NamedTuple):
    """Where the probes of a batch's trees are, as int64 NumPy arrays on the host.

    Attributes:
        kinds: ``(batch, probes)`` index of each one in the group; 0 for padding, as below.
        nodes: ``(batch, probes)`` the node that it is under.
        real: ``(batch, probes)`` bool; False for padding.
        first: ``(batch, nodes)`` index of each node's first probe.
        counts: ``(batch, nodes)`` how many it has.
    """

    kinds: Any
    nodes: Any
    real: Any
    first: Any
    counts: Any

    @classmethod
    def of(cls, counts: Sequence[Sequence[int]]) -> ProbeLayout:
        """So many of the first probes under each node of each row."""
        count = np.array(counts)
        end = count.cumsum(1)
        first, places = end - count, np.arange(end[:, -1].max())
        real = places < end[:, -1:]
        # A probe belongs to the first node whose probes end after it.
        nodes = (end[:, None] <= places[:, None]).sum(2) * real
        kinds = (places - np.take_along_axis(first, nodes, 1)) * real
        return cls(kinds, nodes, real, first, count)

    def depths(self, depths: Any, group: ProbeGroup) -> Any:
        """``(batch, probes)`` depths, given those of the nodes."""
        return np.take_along_axis(depths, self.nodes, 1) + np.array(group.offsets)[self.kinds]

    def visible(self, group: ProbeGroup) -> Any:
        """``(batch, probes, probes)`` bool: whether the first probe sees the second one, which is
        under the same node. Padding sees itself."""
        under = np.where(self.real, self.nodes, -1 - np.arange(self.real.shape[1]))
        same = under[:, :, None] == under[:, None]
        return same & np.array(group.visible)[self.kinds[:, :, None], self.kinds[:, None]]
