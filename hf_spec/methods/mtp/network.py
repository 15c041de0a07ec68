"""A model's layers for multi-token prediction as the network of a drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_spec.drafting.autoregressive import DraftNetwork
from hf_spec.drafting.draft_cache import Rows
from hf_spec.model.hidden_states import model_logits, output_logits, shapes_logits
from hf_spec.modeling_patches.attention_masks import attention_beside
from hf_spec.modeling_patches.mtp import MtpLayers
from hf_spec.modeling_patches.weights import device_of


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
        layers.config._attn_implementation = attention_beside(model, type(model)._supports_sdpa)
        # Trees grow by probabilities, and the layers were trained with the model's own.
        self._logits = model_logits if shapes_logits(model) else output_logits
        self.compiles = self._logits is output_logits  # a graph would hold the model's forward
        sizes = enumerate(map(layers.window, range(self.depth)))
        self.windows = {index: size for index, size in sizes if size is not None}
        self.own = [*layers.parameters(), *layers.buffers()]
        self.weight: Tensor = layers.layers[0].eh_proj.weight  # type: ignore[union-attr, assignment]

    def features(self, states: Tensor) -> Tensor:
        return states.to(self.weight)

    def run(self, tokens: Tensor, hidden: Tensor, rows: Rows, cache: Any) -> tuple[Tensor, Tensor]:
        parts = hidden.split(self.weight.shape[0], dim=-1)
        embeddings, first = self._embedded(tokens), self.depth - len(parts)
        found = [
            self._layer(first + index, embeddings, part, rows, cache)
            for index, part in enumerate(parts)
        ]
        return found[0], self._after(found)

    def run_true(
        self, tokens: Tensor, hidden: Tensor, before: Tensor | None, rows: Rows, cache: Any
    ) -> tuple[Tensor, Tensor]:
        embeddings, found = self._embedded(tokens), []
        width = hidden.shape[-1]
        for index in range(self.depth):
            found.append(self._layer(index, embeddings, hidden, rows, cache))
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
        self, index: int, embeddings: Tensor, hidden: Tensor, rows: Rows, cache: Any
    ) -> Tensor:
        """Forward of one layer, which has no rows of the first ``index`` tokens."""
        positions, window, begin = rows.positions, self.windows.get(index), None
        if index:  # rows that do not exist see themselves: the softmax of nothing is no number
            begin = positions.clamp(max=index)
        if window is not None:
            near = positions - window + 1
            begin = near if begin is None else torch.maximum(near, begin)
        mask, device = rows.mask(begin, window).to(self.weight.device), self.weight.device
        return self.layers.run(index, embeddings, hidden, positions.to(device), mask, cache)

    @staticmethod
    def _after(found: list[Tensor]) -> Tensor:
        return found[0] if len(found) == 1 else torch.cat(found[:-1], dim=-1)
