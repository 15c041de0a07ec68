"""The nodes of a tree that one forward runs over, and where slots stand for their mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_spec.cache.buffers import AttentionStates
from hf_spec.core import mask as masks
from hf_spec.core.tree import Tree
from hf_spec.modeling_patches.attention_masks import Local


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


def slot_positions(lengths: Tensor, at_nodes: Tensor, held: Tensor) -> Tensor:
    """Position of every slot, counted from each row's first token: ``(batch, keys)``.

    Args:
        lengths: ``(batch,)`` tokens before a tree.
        at_nodes: ``(batch, nodes)`` positions of its nodes.
        held: ``(batch or 1, keys)`` the token that each slot holds. Those after the tree continue
            counting.
    """
    node = held - lengths[:, None]
    in_tree = (node >= 0) & (node < at_nodes.shape[1])
    at_node = at_nodes.gather(1, node.clamp(0, at_nodes.shape[1] - 1))
    return torch.where(in_tree, at_node, held)


def first_near(local: Local, queries: Tensor) -> Tensor:
    """The first position that local attention sees from each of these: ``(batch, query)``."""
    if local.chunked:
        return queries // local.size * local.size
    return queries - local.size + 1


class Slots(NamedTuple):
    """What attention of some layers sees slots of, while a tree's nodes are behind the tokens.

    Attributes:
        held: ``(batch or 1, slots)`` the token or node in each, see :func:`masks.places`.
        is_ring: whether they are not in this order.
    """

    held: Tensor
    is_ring: bool

    @classmethod
    def of(
        cls, states: AttentionStates, lengths: Tensor, nodes: int, keys: int,
        window: int | None = None,
    ) -> Slots:  # fmt: skip
        """Those of layers with this window.

        Args:
            lengths: ``(batch,)`` tokens before the tree, which has so many nodes.
            keys: slots of layers without a window that attention sees.
        """
        slots = min(keys, states.slots(window))
        if slots < keys:
            return cls(masks.places(lengths + nodes, slots), True)
        return cls(torch.arange(keys, device=lengths.device)[None], False)

    def mask(
        self, visible: Tensor, lengths: Tensor, packed: bool, begin: Tensor | None = None,
        at_nodes: Tensor | None = None, learned: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The mask of nodes: ``(batch, 1, query, slots)`` bool, True = attend; or a packed one.

        Args:
            visible: ``(batch, query, nodes)`` bool, which of the tree's nodes each sees.
            lengths: ``(batch,)`` tokens before the tree, which all see.
            packed: see :func:`masks.packed`.
            begin: ``(batch, query)`` the first position that each sees; None: all.
            at_nodes: ``(batch, nodes)`` positions of all nodes, with ``begin``.
            learned: ``(batch, query, n)`` bool, what each sees of slots in front.
        """
        if packed and not self.is_ring:
            if begin is not None:
                assert at_nodes is not None
                visible = visible & masks.since(begin, at_nodes)[:, 0]
            return masks.packed(visible, lengths, begin, learned)
        if visible.shape[1:] == (1, 1):  # a plain step: its token is behind the prefix
            made = (self.held <= lengths[:, None])[:, None, None]
        else:
            made = masks.tree(visible, lengths, self.held)
        if begin is not None:
            assert at_nodes is not None
            made &= masks.since(begin, slot_positions(lengths, at_nodes, self.held))
        if learned is not None:
            made = torch.cat([learned[:, None], made], dim=3)
        if packed:  # a ring, whose slots are bits
            return masks.packed(visible[:, :, :0], torch.zeros_like(lengths), front=made[:, 0])
        return made
