"""Probes: rows of a step that carry a learned embedding and ask the model for a future token.

BiTA's and SPACE's mask tokens and PPD's prompt tokens are probes. A *group* of probes hangs under a
node of the tree: it sees what the node sees, and some of its own group; nothing sees a probe but
its group. Probes stand behind all nodes of the tree. This module knows shapes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hf_spec.core.transfer import sent
from hf_spec.core.tree import TreeBatch


@dataclass(frozen=True)
class ProbeGroup:
    """The probes under one node; probe ``i`` carries the ``i``-th learned embedding.

    Args:
        offsets: positions behind the node, from 1; a probe at offset d asks for the token at d + 1.
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
    offsets = torch.tensor(group.offsets, dtype=torch.long, device=device)
    visible = torch.tensor(group.visible, dtype=torch.bool, device=device)
    return offsets, visible.reshape(len(group), len(group))


@dataclass(frozen=True)
class ProbeRows:
    """Probes under the nodes of a batch of trees, as tensors.

    Attributes:
        group: what hangs under a node that has all its probes; others have its first ones.
        kinds: ``(batch, probes)`` int64: which probe of the group; padding has 0.
        anchors: ``(batch, probes)`` int64: the node that each hangs under; padding has 0.
        depths: ``(batch, nodes + probes)`` of the tree's nodes and of the probes.
        ancestors: ``(batch, nodes + probes, nodes + probes)`` bool: what each row sees of them.
        first: ``(batch, nodes)`` row of the first probe under each node, counted behind the nodes.
        counts: ``(batch, nodes)`` probes under each node.
        sizes: the same on the host.
    """

    group: ProbeGroup
    kinds: Tensor
    anchors: Tensor
    depths: Tensor
    ancestors: Tensor
    first: Tensor
    counts: Tensor
    sizes: tuple[tuple[int, ...], ...]

    @property
    def num_probes(self) -> int:
        return self.kinds.shape[1]

    def under(self, nodes: Tensor) -> Tensor:
        """Rows of the probes under one node of each batch row.

        Args:
            nodes: ``(batch,)``.

        Returns:
            ``(batch, len(group))`` rows counted behind the tree's nodes; those past the size of
            the node's group are any rows.
        """
        steps = torch.arange(len(self.group), device=nodes.device)
        rows = self.first.gather(1, nodes[:, None]) + steps
        return rows.clamp(max=max(self.num_probes - 1, 0))


def hang(
    group: ProbeGroup, tree: TreeBatch, sizes: Sequence[Sequence[int]] | None = None
) -> ProbeRows:
    """Hang probes under the nodes of ``tree``.

    Args:
        group: probes of a full group.
        tree: the tree of each row.
        sizes: probes under each node of each row's tree, 0 to ``len(group)``; None: all of them
            under every node.
    """
    batch, nodes, device = tree.batch_size, tree.num_nodes, tree.parents.device
    if sizes is None:
        held = ((len(group),) * nodes,) * batch
    else:
        held = tuple((*row, *[0] * (nodes - len(row))) for row in sizes)
    count = sent(held, device, torch.long)
    end = count.cumsum(-1)
    first = end - count
    rows = torch.arange(nodes + max(map(sum, held)), device=device).expand(batch, -1)
    places = rows[:, : rows.shape[1] - nodes]
    real = places < end[:, -1:]
    # The node of a place is the first one whose probes end behind it.
    anchors = torch.searchsorted(end, places.contiguous(), right=True) * real
    kinds = (places - first.gather(1, anchors)) * real
    offsets, visible = group_tensors(group, str(device))
    at = torch.cat([rows[:, :nodes], anchors], dim=1)
    depths = tree.depths.gather(1, at)
    depths[:, nodes:] += offsets[kinds]
    ancestors = tree.ancestors.new_zeros(batch, *rows.shape[1:] * 2)
    ancestors[:, :, :nodes] = tree.ancestors.gather(1, at[:, :, None].expand(-1, -1, nodes))
    # A probe sees its own group; padding, which has no group, sees what the root sees, and itself.
    own = torch.where(real, anchors, nodes + rows[:, nodes:])
    same = own[:, :, None] == own[:, None, :]
    seen = visible[kinds].gather(2, kinds[:, None].expand_as(same))
    ancestors[:, nodes:, nodes:] = same & seen
    return ProbeRows(group, kinds, anchors, depths, ancestors, first, count, held)
