"""Probes: step tokens with a learned embedding that ask the model for a future token.

BiTA's and SPACE's mask tokens and PPD's prompt tokens are probes. A *group* of probes is attached
to a node of the tree. A probe sees what the node sees, and some probes of its own group; only its
group sees a probe. Probes come after all nodes of the tree. This module knows only shapes.
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
    offsets = torch.tensor(group.offsets, dtype=torch.long, device=device)
    visible = torch.tensor(group.visible, dtype=torch.bool, device=device)
    return offsets, visible.reshape(len(group), len(group))


@dataclass(frozen=True)
class ProbeRows:
    """Probes under the nodes of a batch of trees, as tensors.

    Attributes:
        group: the full group; a node with fewer probes has the first ones.
        kinds: ``(batch, probes)`` int64: index of the probe in the group; 0 for padding.
        anchors: ``(batch, probes)`` int64: the node of each probe; 0 for padding.
        depths: ``(batch, nodes + probes)`` of the tree's nodes and of the probes.
        ancestors: ``(batch, nodes + probes, nodes + probes)`` bool: what each step token sees.
        first: ``(batch, nodes)`` index of the first probe under each node, counted after the nodes.
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
        """Indices of the probes under one node of each batch row.

        Args:
            nodes: ``(batch,)``.

        Returns:
            ``(batch, len(group))`` indices counted after the tree's nodes; entries past the size of
            the node's group are arbitrary.
        """
        steps = torch.arange(len(self.group), device=nodes.device)
        rows = self.first.gather(1, nodes[:, None]) + steps
        return rows.clamp(max=max(self.num_probes - 1, 0))


def hang(
    group: ProbeGroup, tree: TreeBatch, sizes: Sequence[Sequence[int]] | None = None
) -> ProbeRows:
    """Attach probes to the nodes of ``tree``.

    Args:
        group: the full group.
        tree: the tree of each row.
        sizes: probes under each node of each row's tree, 0 to ``len(group)``; None for a full
            group under every node.
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
    # A probe belongs to the first node whose probes end after it.
    anchors = torch.searchsorted(end, places.contiguous(), right=True) * real
    kinds = (places - first.gather(1, anchors)) * real
    offsets, visible = group_tensors(group, str(device))
    at = torch.cat([rows[:, :nodes], anchors], dim=1)
    depths = tree.depths.gather(1, at)
    depths[:, nodes:] += offsets[kinds]
    ancestors = tree.ancestors.new_zeros(batch, *rows.shape[1:] * 2)
    ancestors[:, :, :nodes] = tree.ancestors.gather(1, at[:, :, None].expand(-1, -1, nodes))
    # A probe sees its own group. Padding has no group; it sees what the root sees, and itself.
    own = torch.where(real, anchors, nodes + rows[:, nodes:])
    same = own[:, :, None] == own[:, None, :]
    seen = visible[kinds].gather(2, kinds[:, None].expand_as(same))
    ancestors[:, nodes:, nodes:] = same & seen
    return ProbeRows(group, kinds, anchors, depths, ancestors, first, count, held)
