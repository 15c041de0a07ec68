"""The nodes of a tree that one forward runs over, as the mask and the positions need them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hf_spec.core.tree import Tree


class Block(NamedTuple):
    """Some nodes of a tree.

    Attributes:
        tree: the tree.
        tokens: ``(batch, n)`` token ids, then indices of probes' embeddings.
        depths: ``(batch, n)``
        visible: ``(batch, n, nodes)`` bool, which of the tree's nodes each of them sees.
    """

    tree: Tree
    tokens: Tensor
    depths: Tensor
    visible: Tensor

    @classmethod
    def of(cls, tree: Tree, nodes: slice | Tensor = slice(None)) -> Block:
        """These nodes, or ``(n,)`` indices of nodes, of a tree. Its probes must be among them."""
        return cls(tree, tree.tokens[:, nodes], tree.depths[:, nodes], tree.ancestors[:, nodes])

    @property
    def ids(self) -> Tensor:
        """``(batch, tokens)`` the nodes with token ids."""
        return self.tokens[:, : self.tokens.shape[1] - self.tree.num_probes]

    @property
    def kinds(self) -> Tensor:
        """``(batch, probes)`` the index of each probe's embedding."""
        return self.tokens[:, self.tokens.shape[1] - self.tree.num_probes :]
