"""The nodes of a tree that one forward runs over, as the mask and the positions need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from hf_spec.core.buckets import bucket
from hf_spec.core.tree import Tree

#: Least number of this step's slots that a later forward of the same step can see, if compiled.
SLOTS = 64


class Block(NamedTuple):
    """Some nodes of a tree.

    Attributes:
        tokens: ``(batch, n)`` token ids, then indices of probes' embeddings.
        depths: ``(batch, n)``
        visible: ``(batch, n, slots)`` bool, which of the slots after the accepted tokens each node
            sees.
        slot_depths: ``(batch, slots)`` depths of the nodes in these slots.
        num_probes: how many of the nodes are probes.
    """

    tokens: Tensor
    depths: Tensor
    visible: Tensor
    slot_depths: Tensor
    num_probes: int = 0

    @classmethod
    def of(cls, tree: Tree, first: int = 0) -> Block:
        """The nodes from ``first`` on; those before were forwarded earlier in this step."""
        return cls(
            tree.tokens[:, first:], tree.depths[:, first:], tree.ancestors[:, first:],
            tree.depths, tree.num_probes,
        )  # fmt: skip

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor]) -> Block:
        """A block without probes, of its first four attributes."""
        tokens, depths, visible, slot_depths = tensors
        return cls(tokens, depths, visible, slot_depths)

    @property
    def ids(self) -> Tensor:
        """``(batch, tokens)`` the nodes with token ids."""
        return self.tokens[:, : self.tokens.shape[1] - self.num_probes]

    @property
    def kinds(self) -> Tensor:
        """``(batch, probes)`` the index of each probe's embedding."""
        return self.tokens[:, self.tokens.shape[1] - self.num_probes :]

    def padded(self, first: int) -> Block:
        """A block without probes, padded to a recurring number of nodes and of slots; padding sees
        only itself.

        Args:
            first: number of slots before those that the forward writes.
        """
        nodes = self.tokens.shape[1]
        most = bucket(nodes)
        slots = max(SLOTS, bucket(first + most))
        visible = self.visible.new_zeros(len(self.tokens), most, slots)
        visible.diagonal(first, 1, 2).fill_(True)
        visible[:, :nodes, : first + nodes] = self.visible
        more = (0, most - nodes)
        return Block(
            pad(self.tokens, more), pad(self.depths, more), visible,
            pad(self.slot_depths, (0, slots - first - nodes)),
        )  # fmt: skip
