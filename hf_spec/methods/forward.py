"""One forward pass over nodes of a tree, behind what the cache holds.

Builds positions and mask, opens the cache's block and calls the model. Knows models and caches;
knows nothing of drafting, acceptance or generation options.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from hf_spec.core import mask as masks
from hf_spec.core.cache import TreeCache
from hf_spec.core.tree import TreeBatch
from modeling_patches.attention_masks import TreeAttention


class TreeForward:
    """Runs ``model`` on tree nodes; made once per ``generate()`` call.

    Args:
        model: the causal language model.
        cache: where keys and values go.
        attention: converter of masks, from ``tree_attention``.
        last_position: ``(batch,)`` positions are cut off here: nodes further down lie past the
            call's budget and are never accepted, but learned position tables end somewhere.
        position_shift: ``(batch,)`` position of a row's first cached token (0 unless the caller
            gave position ids of his own).
        model_kwargs: further arguments for the model's forward.
    """

    def __init__(
        self,
        model: Any,
        cache: TreeCache,
        attention: TreeAttention,
        last_position: Tensor,
        position_shift: Tensor,
        model_kwargs: dict[str, Any] | None = None,
    ):
        self.model = model
        self.cache = cache
        self.attention = attention
        self.last_position = last_position[:, None]
        self.position_shift = position_shift[:, None]
        self.model_kwargs = model_kwargs or {}
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.dtype = model.get_input_embeddings().weight.dtype
        self.device = model.get_input_embeddings().weight.device

    def __call__(self, tokens: Tensor, tree: TreeBatch, first: int = 0) -> Tensor:
        """Logits after the nodes ``first ..`` of the tree.

        Args:
            tokens: ``(batch, nodes)`` of the whole tree.
            tree: the tree of each row; nodes before ``first`` were forwarded earlier in this step.
            first: first node to forward.

        Returns:
            ``(batch, nodes - first, vocab)``, in the model's dtype.
        """
        nodes = tree.num_nodes
        keys = self.cache.begin(nodes - first, offset=first)
        lengths = self.cache.lengths
        node_positions = torch.minimum(
            lengths[:, None] + self.position_shift + tree.depths, self.last_position
        )
        inputs: dict[str, Any] = {
            **self.model_kwargs,
            "input_ids": tokens[:, first:].to(self.device),
            "attention_mask": self._mask(tree, first, keys, node_positions),
            "past_key_values": self.cache,
            "use_cache": True,
            "return_dict": True,
        }
        if self.takes_positions:
            inputs["position_ids"] = node_positions[:, first:].to(self.device)
        return self.model(**inputs).logits

    def _mask(self, tree: TreeBatch, first: int, keys: int, node_positions: Tensor) -> Any:
        """The forward's attention mask over ``keys`` slots for the nodes from ``first`` on."""
        lengths = self.cache.lengths
        batch, nodes = node_positions.shape
        visible = masks.or_(
            masks.prefix(lengths), masks.tree_ancestors(tree.ancestors[:, first:], lengths)
        )
        shape = (batch, nodes - first, keys, lengths.device)
        full = masks.build(visible, *shape)
        windows = self.attention.windows
        windowed = {size for size in windows.values() if size is not None and size < keys}
        made: dict[int | None, Tensor] = {None: full}
        if windowed or self.attention.wants_positions:
            key_positions = self._key_positions(keys, node_positions)
            query_positions = node_positions[:, first:]
            for size in windowed:
                near = masks.window(size, query_positions, key_positions)
                made[size] = full & masks.build(near, *shape)
            if self.attention.wants_positions:
                self.attention.set_positions(query_positions, key_positions)
        return self.attention.convert(
            {kind: made.get(size, full) for kind, size in windows.items()}, self.dtype
        )

    def _key_positions(self, keys: int, node_positions: Tensor) -> Tensor:
        """Token position of every slot: (batch, keys). Slots behind the tree count on."""
        slots = torch.arange(keys, device=node_positions.device)
        node = slots - self.cache.lengths[:, None]
        in_tree = (node >= 0) & (node < node_positions.shape[1])
        at_node = node_positions.gather(1, node.clamp(0, node_positions.shape[1] - 1))
        return torch.where(in_tree, at_node, slots + self.position_shift)
