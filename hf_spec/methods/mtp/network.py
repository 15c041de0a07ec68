"""A model's layers for multi-token prediction as the network of a drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.drafting.autoregressive import DraftNetwork
from hf_spec.drafting.training_time_test import ChainCache
from hf_spec.model.block import slot_positions
from hf_spec.model.hidden_states import model_logits, output_logits, shapes_logits
from modeling_patches.mtp import MtpLayers
from modeling_patches.weights import device_of


class MtpNetwork(DraftNetwork):
    """The layers with the model's embeddings.

    Layer ``d`` predicts what follows a draft token of depth ``d``, and takes the output of layer
    ``d - 1`` at the row before (DeepSeek-V3, section 2.2). So a row runs through all layers that
    are still to come, and the next row takes the outputs of all but the last, side by side. Below
    the last layer's depth, it is used again and takes its own output.
    """

    def __init__(self, model: Any, layers: MtpLayers):
        self.model, self.layers = model, layers
        self.num_layers, self.depth = layers.num_caches, len(layers.layers)
        # Trees grow by probabilities, and the layers were trained with the model's own.
        self._logits = model_logits if shapes_logits(model) else output_logits
        # A graph would hold the positions of the block's nodes, and the model's forward.
        self.compiles = self._logits is output_logits and not any(
            map(layers.window, range(self.depth))
        )
        self.own = [*layers.parameters(), *layers.buffers()]
        self.weight: Tensor = layers.layers[0].eh_proj.weight  # type: ignore[union-attr, assignment]

    def features(self, states: Tensor) -> Tensor:
        return states.to(self.weight)

    def run(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        parts = hidden.split(self.weight.shape[0], dim=-1)
        embeddings, first = self._embedded(tokens), self.depth - len(parts)
        found = [
            self._layer(first + index, embeddings, part, positions, mask, cache)
            for index, part in enumerate(parts)
        ]
        return found[0], self._after(found)

    def run_true(
        self, tokens: Tensor, hidden: Tensor, before: Tensor | None, positions: Tensor,
        mask: Tensor, cache: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        embeddings, found = self._embedded(tokens), []
        width = hidden.shape[-1]
        for index in range(self.depth):
            found.append(self._layer(index, embeddings, hidden, positions, mask, cache))
            last = torch.zeros_like(hidden[:, :1])
            if before is not None and index + 1 < self.depth:
                last = before[..., index * width : (index + 1) * width]
            hidden = torch.cat([last, found[-1][:, :-1]], dim=1)
        return found[0], self._after(found)

    def logits(self, states: Tensor) -> Tensor:
        return self._logits(self.model, states)

    def _embedded(self, tokens: Tensor) -> Tensor:
        module = self.model.get_input_embeddings()
        found: Tensor = module(tokens.to(device_of(module)))
        return found.to(self.weight)

    def _layer(
        self, index: int, embeddings: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor,
        cache: TreeCache | ChainCache,
    ) -> Tensor:  # fmt: skip
        """Forward of one layer, which has no rows of the first ``index`` tokens."""
        if isinstance(cache, ChainCache):
            at_keys = cache.positions
        else:
            at_keys = torch.arange(mask.shape[-1], device=mask.device)[None]
            if self.layers.window(index) is not None:  # else drafted rows come behind all others
                assert cache.block is not None and cache.block.tree is not None
                at_keys = slot_positions(cache.lengths, cache.block.tree.depths, at_keys)
        seen = mask & (at_keys >= index)[:, None, None]
        # Rows that do not exist see something, since the softmax of nothing is no number.
        seen = torch.where(seen.any(-1, keepdim=True), seen, mask)
        device = self.weight.device
        return self.layers.run(
            index, embeddings, hidden, positions.to(device), seen.to(device), at_keys.to(device),
            cache,
        )  # fmt: skip

    @staticmethod
    def _after(found: list[Tensor]) -> Tensor:
        return found[0] if len(found) == 1 else torch.cat(found[:-1], dim=-1)
