"""The BITA adapter's parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.layer import SpecAdapterLayer
from hf_spec.methods.bita.config import BitaConfig
from modeling_patches.weights import input_features

#: Standard deviation of initial embeddings (section 4.1).
INIT_STD = 0.02


class BitaAdapter(SpecAdapterLayer):
    """Mask tokens, and prompt tokens by depth of prompting.

    ``masks`` is ``(M, hidden)``. Shallow prompts are ``prompts``, ``(P, hidden)``; deep ones are
    ``prompt_keys`` and ``prompt_values``, ``(layers, kv_heads, P, head_dim)`` each.
    """

    def build(self, config: SpecPeftConfig, model: Any) -> Mapping[str, Tensor]:
        assert isinstance(config, BitaConfig) and config.num_mask_tokens is not None
        _, hidden = input_features(model)
        count = config.num_prompt_tokens
        tensors = {"masks": torch.randn(config.num_mask_tokens, hidden) * INIT_STD}
        if config.prompt_depth == "shallow":
            tensors["prompts"] = torch.randn(count, hidden) * INIT_STD
        elif config.prompt_depth == "deep":
            tensors |= config.fresh_states("prompt", count, INIT_STD)
        return {**tensors, **config.fresh_shared(model, config.num_mask_tokens)}
