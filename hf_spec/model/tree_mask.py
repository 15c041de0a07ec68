"""The attention mask of a block of tree nodes behind the tokens of a KV cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_spec.core import mask as masks
from hf_spec.model.block import Block
from hf_spec.model.probe_inputs import ProbeInputs
from modeling_patches.attention_masks import Local, TreeAttention


class Slots(NamedTuple):
    """What is known of the slots that attention sees.

    Attributes:
        cache: the KV cache with the open block.
        position_shift: ``(batch, 1)`` position of each row's first cached token.
        last_position: ``(batch, 1)`` larger positions are clamped to this one.
        padding: ``(batch, 1)`` columns of padding before each row's first token.
    """

    cache: Any
    position_shift: Tensor
    last_position: Tensor
    padding: Tensor

    def positions(self, block: Block, keys: int) -> Tensor:
        """Token position of every slot: (batch, keys). Slots after the tree continue counting."""
        lengths = self.cache.lengths
        at_nodes = lengths[:, None] + self.position_shift + block.slot_depths
        at_nodes = torch.minimum(at_nodes, self.last_position)
        slots = torch.arange(keys, device=lengths.device)
        node = slots - lengths[:, None]
        in_tree = (node >= 0) & (node < at_nodes.shape[1])
        at_node = at_nodes.gather(1, node.clamp(0, at_nodes.shape[1] - 1))
        return torch.where(in_tree, at_node, slots + self.position_shift)


def tree_mask(
    attention: TreeAttention, block: Block, keys: int, positions: Tensor, slots: Slots,
    probe_inputs: ProbeInputs | None, dtype: torch.dtype,
) -> Any:  # fmt: skip
    """The mask of a forward, as the model's attention takes it; probes see the front slots, too.

    Args:
        attention: the kinds of attention of the model's layers.
        block: the nodes that are run.
        keys: number of slots that attention sees, without the front slots.
        positions: ``(batch, n)`` of the nodes.
        slots: what is known of the slots.
        probe_inputs: the probes' learned inputs, if there are any.
        dtype: of an additive mask.
    """
    cache = slots.cache
    lengths = cache.lengths
    batch, count = positions.shape
    shape = (batch, count, keys, lengths.device)
    if block.visible.shape[1:] == (1, 1):  # a plain step: its token stands behind the prefix
        full = (torch.arange(keys, device=lengths.device) <= lengths[:, None])[:, None, None]
    else:
        full = masks.tree(block.visible, lengths, keys)
    kinds = attention.locals
    narrow = {local for local in kinds.values() if local is not None and local.size < keys}
    made: dict[Local | None, Tensor] = {None: full}
    front = cache.states.front if cache.block.front else 0
    if narrow or attention.wants_positions:
        # Counted from each row's first token, whatever positions the caller gave.
        at_queries = positions - slots.position_shift
        at_keys = slots.positions(block, keys) - slots.position_shift
        for local in narrow:
            made[local] = full & masks.build(near(local, at_queries, at_keys), *shape)
        if attention.wants_positions:
            if front:  # they stand where the sequence begins, as in prefix tuning
                at_keys = torch.cat([at_keys.new_zeros(batch, front), at_keys], dim=1)
            attention.set_positions(at_queries, at_keys, slots.padding)
    if front and probe_inputs is not None and block.num_probes:
        learned = full.new_zeros((batch, 1, count, front))
        seen = probe_inputs.sees_front(block.kinds.to(full.device))
        learned[:, 0, -block.num_probes :, front - probe_inputs.num_front :] = seen
        made = {local: torch.cat([learned, mask], dim=3) for local, mask in made.items()}
        full = made[None]
    return attention.convert({kind: made.get(local, full) for kind, local in kinds.items()}, dtype)


def near(local: Local, query_positions: Tensor, key_positions: Tensor) -> masks.Predicate:
    """The keys that local attention sees, given ``(batch, query)`` and ``(batch, key)``
    positions."""
    predicate = masks.chunk if local.chunked else masks.window
    return predicate(local.size, query_positions, key_positions)
