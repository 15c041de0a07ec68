"""The decoder of an EAGLE3 adapter on its base model, and its training loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.predicting import VOCABULARY, vocab_size
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.drafting.autoregressive import DraftNetwork, MaskRows
from hf_spec.drafting.training_time_test import chain_loss
from hf_spec.methods.eagle3.adapter import Eagle3Adapter
from hf_spec.model.hidden_states import soft_capped
from hf_spec.model.row_embeddings import RowEmbeddings
from modeling_patches.weights import device_of


class Eagle3Network(DraftNetwork):
    """An adapter's decoder on its base.

    Raises:
        ValueError: the model lacks some of the tokens that it predicts.
    """

    def __init__(self, model: Any, adapter: Eagle3Adapter):
        self.model, self.adapter = model, adapter
        self.num_layers = len(adapter.layers)
        self.masks: MaskRows | None = None if adapter.config.mask_token_id is None else self._masks
        self.token_ids = self._token_ids()
        self._embed: Any = getattr(adapter, "embed_tokens", None)
        if self._embed is None:
            plain = adapter.config.embedding_scale is None
            self._embed = model.get_input_embeddings() if plain else RowEmbeddings(model)

    def _token_ids(self) -> Tensor | None:
        known, size = vocab_size(self.model), self.adapter.lm_head.out_features
        ids: Tensor | None = getattr(self.adapter, VOCABULARY, None)
        if ids is None:
            device = device_of(self.adapter.lm_head)
            return None if size == known else torch.arange(size, device=device)
        ascending = bool((ids[1:] > ids[:-1]).all())
        if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= known:
            raise ValueError(
                f"this adapter predicts tokens {int(ids[0])} to {int(ids[-1])}"
                f"{'' if ascending else ', not in ascending order'}; the model has {known}: it was "
                "made for another model, or its file is damaged. Load it on its own model."
            )
        return ids

    def embedded(self, tokens: Tensor) -> Tensor:
        """``(batch, n, hidden)`` input embeddings of tokens ``(batch, n)``."""
        found: Tensor = self._embed(tokens)
        scale = self.adapter.config.embedding_scale
        return found if scale in (None, 1.0) else found * scale

    def features(self, states: Tensor) -> Tensor:
        return self.adapter.fused(states)

    def run(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.adapter(
            self.embedded(tokens), hidden, positions, mask, cache
        )
        return found

    def _masks(self, batch: int, count: int) -> tuple[Tensor, Tensor]:
        hidden = self.features(self.adapter.mask_hidden).expand(batch, count, -1)
        token = self.adapter.config.mask_token_id
        return torch.full((batch, count), token, device=hidden.device), hidden

    def logits(self, states: Tensor) -> Tensor:
        return soft_capped(self.adapter.lm_head(states), self.adapter.config.logit_softcap)


def loss(model: Any, adapter: ActiveAdapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """See :func:`chain_loss`."""
    config: Any = adapter.config
    network = Eagle3Network(model, adapter.module)
    return chain_loss(
        model, network, batch, config.layers, config.ttt_steps, config.decay, config.loss
    )
