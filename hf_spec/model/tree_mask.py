"""The nodes of a tree that one forward runs over, and their attention mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_spec.core import mask as masks
from hf_spec.core.tree import Tree
from modeling_patches.attention_masks import Local

if TYPE_CHECKING:
    from hf_spec.model.target import Target


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


def tree_mask(target: Target, block: Block, keys: int, positions: Tensor) -> Any:
    """The mask of a forward behind the tokens of a KV cache, as the model's attention takes it.

    Args:
        target: the model, and its KV cache with the open block.
        block: the nodes that are run; probes see the front slots, too.
        keys: number of slots that attention sees, without the front slots.
        positions: ``(batch, n)`` of the nodes.
    """
    attention, cache, lengths = target.attention, target.cache, target.cache.lengths
    if block.visible.shape[1:] == (1, 1):  # a plain step: its token stands behind the prefix
        full = (torch.arange(keys, device=lengths.device) <= lengths[:, None])[:, None, None]
    else:
        full = masks.tree(block.visible, lengths, keys)
    kinds = attention.locals
    narrow = {local for local in kinds.values() if local is not None and local.size < keys}
    made: dict[Local | None, Tensor] = {None: full}
    front = cache.states.front if cache.block and cache.block.front else 0
    if narrow or attention.wants_positions:
        # Counted from each row's first token, whatever positions the caller gave.
        at_queries = positions - target.position_shift
        last = target.last_position - target.position_shift
        at_keys = slot_positions(lengths, block.tree.depths, keys, last)
        for local in narrow:
            made[local] = full & near(local, at_queries, at_keys)
        if attention.wants_positions:
            if front:  # they stand where the sequence begins, as in prefix tuning
                at_keys = pad(at_keys, (front, 0))
            attention.set_positions(at_queries, at_keys, target.padding)
    if front and target.front_seen is not None:
        learned = full.new_zeros((*positions.shape, front))[:, None]
        seen = target.front_seen[block.kinds.to(full.device)]
        learned[:, 0, -block.tree.num_probes :, front - target.num_front :] = seen
        made = {local: torch.cat([learned, mask], dim=3) for local, mask in made.items()}
    by_kind = {kind: made.get(local, made[None]) for kind, local in kinds.items()}
    return attention.convert(by_kind, target.dtype)


def slot_positions(
    lengths: Tensor, depths: Tensor, keys: int, last: Tensor | None = None
) -> Tensor:
    """Position of every slot, counted from each row's first token: ``(batch, keys)``. Slots after
    the tree continue counting; larger positions of nodes are clamped to ``last`` ``(batch, 1)``."""
    at_nodes = lengths[:, None] + depths
    if last is not None:
        at_nodes = torch.minimum(at_nodes, last)
    slots = torch.arange(keys, device=lengths.device)
    node = slots - lengths[:, None]
    in_tree = (node >= 0) & (node < at_nodes.shape[1])
    at_node = at_nodes.gather(1, node.clamp(0, at_nodes.shape[1] - 1))
    return torch.where(in_tree, at_node, slots)


def near(local: Local, queries: Tensor, keys: Tensor) -> Tensor:
    """The keys that local attention sees, given ``(batch, query)`` and ``(batch, key)`` positions:
    ``(batch, 1, query, key)``."""
    return (masks.chunk if local.chunked else masks.window)(local.size, queries, keys)
