"""The nodes of a tree that one forward runs over, as the mask and the positions need them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hf_spec.core.tree import Tree


class Block(NamedTuple):
    """Some nodes of a tree.

    Attributes:
        tokens: ``(batch, n)`` token ids, then indices of probes' embeddings.
        depths: ``(batch, n)``
        visible: ``(batch, n, nodes)`` bool, which of the tree's nodes each of them sees.
        slot_depths: ``(batch, nodes)`` depths of all nodes of the tree.
        num_probes: how many of the nodes are probes.
    """

    tokens: Tensor
    depths: Tensor
    visible: Tensor
    slot_depths: Tensor
    num_probes: int = 0

    @classmethod
    def of(cls, tree: Tree, nodes: slice | Tensor = slice(None)) -> Block:
        """These nodes, or ``(n,)`` indices of nodes, of a tree. Its probes must be among them."""
        return cls(
            tree.tokens[:, nodes], tree.depths[:, nodes], tree.ancestors[:, nodes], tree.depths,
            tree.num_probes,
        )  # fmt: skip

    @property
    def ids(self) -> Tensor:
        """``(batch, tokens)`` the nodes with token ids."""
        return self.tokens[:, : self.tokens.shape[1] - self.num_probes]

    @property
    def kinds(self) -> Tensor:
        """``(batch, probes)`` the index of each probe's embedding."""
        return self.tokens[:, self.tokens.shape[1] - self.num_probes :]
