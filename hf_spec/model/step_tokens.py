"""The step tokens that a forward runs over, padded to recurring shapes for compiled code."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from hf_spec.core.buckets import bucket
from hf_spec.core.probes import ProbeGroup, ProbeRows
from hf_spec.core.tree import TreeBatch

#: Least number of this step's slots that a later forward of the same step can see.
SLOTS = 64


class StepTokens(NamedTuple):
    """The tokens that a forward runs over: some nodes of a tree, followed by probes.

    Attributes:
        ids: ``(batch, nodes)`` token ids of these nodes.
        depths: ``(batch, nodes + probes)``
        visible: ``(batch, nodes + probes, slots)`` bool, which of the slots after the accepted
            tokens each step token sees.
        slot_depths: ``(batch, slots)`` depths of the tokens in these slots.
        kinds: ``(batch, probes)`` index of each probe's learned embedding; None without probes.
    """

    ids: Tensor
    depths: Tensor
    visible: Tensor
    slot_depths: Tensor
    kinds: Tensor | None = None

    @property
    def total(self) -> int:
        return self.depths.shape[1]

    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        return [part for part in self if part is not None]


class MatchInputs(NamedTuple):
    """Inputs of the match rule besides the tokens that ran.

    Attributes:
        parents, valid: ``(batch, nodes)``, see :class:`TreeBatch`.
        first, counts: ``(batch, nodes)``, see :class:`ProbeRows`; None without probes.
    """

    parents: Tensor
    valid: Tensor
    first: Tensor | None = None
    counts: Tensor | None = None

    @classmethod
    def of(cls, tree: TreeBatch, probes: ProbeRows | None) -> MatchInputs:
        """Create the inputs, padded to a recurring number of nodes; padding is not valid."""
        parts = [tree.parents, tree.valid]
        parts += [] if probes is None else [probes.first, probes.counts]
        more = bucket(tree.num_nodes) - tree.num_nodes
        return cls(*(pad(part, (0, more)) for part in parts))

    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        return [part for part in self if part is not None]

    def tree(self, step: StepTokens) -> TreeBatch:
        """The trees of a padded step; depths on the host are upper bounds."""
        batch, nodes = step.ids.shape
        most = (nodes - 1,) * batch
        depths, ancestors = step.depths[:, :nodes], step.visible[:, :nodes, :nodes]
        return TreeBatch(self.parents, depths, ancestors, self.valid, most, most, False)

    def probes(self, step: StepTokens, group: ProbeGroup) -> ProbeRows | None:
        """The probes of a padded step."""
        if step.kinds is None or self.first is None or self.counts is None:
            return None
        return ProbeRows(
            group, step.kinds, step.kinds, step.depths, step.visible, self.first, self.counts, ()
        )


def padded(step: StepTokens, first: int) -> StepTokens:
    """Pad to recurring numbers of nodes and probes; padding sees only itself.

    Args:
        first: number of this step's slots before those that the forward writes.
    """
    nodes, batch = step.ids.shape[1], step.ids.shape[0]
    probes = step.total - nodes
    most, behind = bucket(nodes), bucket(probes)
    # This step's tokens already in the cache are followed directly by the new ones.
    slots = most + behind if not first else max(SLOTS, bucket(first + most))
    places = [(slice(0, nodes), slice(0, nodes)), (slice(most, most + probes), slice(nodes, None))]
    depths = step.depths.new_zeros(batch, most + behind)
    visible = step.visible.new_zeros(batch, most + behind, slots)
    visible.diagonal(first, 1, 2).fill_(True)
    for into, part in places:
        depths[:, into] = step.depths[:, part]
    if first:
        slot_depths = step.depths.new_zeros(batch, slots)
        slot_depths[:, : first + nodes] = step.slot_depths
        visible[:, :nodes, : first + nodes] = step.visible
    else:
        slot_depths = depths
        for into, part in places:
            for slot_into, slot_part in places:
                visible[:, into, slot_into] = step.visible[:, part, slot_part]
    ids = pad(step.ids, (0, most - nodes))
    kinds = step.kinds
    if kinds is not None:
        kinds = pad(kinds, (0, behind - probes))
    return StepTokens(ids, depths, visible, slot_depths, kinds)
