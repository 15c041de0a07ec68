"""The nodes of a tree that one forward runs over, and where slots stand for their mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_spec.core import mask as masks
from hf_spec.core.tree import Tree
from modeling_patches.attention_masks import Local


class Block(NamedTuple):
    """Some nodes of a tree."""

    tree: Tree
    tokens: Tensor  # (batch, n) token ids, then indices of probes' embeddings
    depths: Tensor  # (batch, n)
    visible: Tensor  # (batch, n, nodes) bool, which of the tree's nodes each of them sees

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


def slot_positions(
    lengths: Tensor, depths: Tensor, held: Tensor, last: Tensor | None = None
) -> Tensor:
    """Position of every slot, counted from each row's first token: ``(batch, keys)``.

    Args:
        lengths, depths: ``(batch,)`` tokens before a tree, and ``(batch, nodes)`` its depths.
        held: ``(batch, keys)`` or ``(keys,)`` the token that each slot holds. Those after the tree
            continue counting.
        last: ``(batch, 1)`` larger positions of nodes are clamped to this one.
    """
    at_nodes = lengths[:, None] + depths
    if last is not None:
        at_nodes = torch.minimum(at_nodes, last)
    node = held - lengths[:, None]
    in_tree = (node >= 0) & (node < at_nodes.shape[1])
    at_node = at_nodes.gather(1, node.clamp(0, at_nodes.shape[1] - 1))
    return torch.where(in_tree, at_node, held)


def near(local: Local, queries: Tensor, keys: Tensor) -> Tensor:
    """The keys that local attention sees, given ``(batch, query)`` and ``(batch, key)`` positions:
    ``(batch, 1, query, key)``."""
    return (masks.chunk if local.chunked else masks.window)(local.size, queries, keys)


def first_near(local: Local, queries: Tensor) -> Tensor:
    """The first position that local attention sees from each of these: ``(batch, query)``."""
    if local.chunked:
        return queries // local.size * local.size
    return (queries - local.size + 1).clamp(min=0)
