"""The PPD adapter's parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.layer import SpecAdapterLayer
from hf_spec.methods.ppd.config import PPDConfig
from modeling_patches.weights import input_features, output_features, placement

#: Standard deviation of initial prefix tokens, which are not initialised from text.
INIT_STD = 0.02


class PPDAdapter(SpecAdapterLayer):
    """Prompt tokens, and further parameters by config.

    ``prompts`` is ``(m * n, hidden)`` for m prompt tokens of n EPTs, those of distance 1 first.
    Depending on the config, there are also:

    * ``weights`` ``(m, n)`` of the EPTs;
    * ``prefix_keys`` and ``prefix_values``, ``(layers, kv_heads, m * prefix tokens, head_dim)``;
    * ``head`` ``(vocab, hidden)``, added to the base's output embeddings; or ``head`` ``(hidden,
      hidden)`` and ``head_bias`` ``(hidden,)`` of a residual block before them, with a rank
      ``head_down`` ``(rank, hidden)`` and ``head_up`` ``(hidden, rank)`` instead of ``head``.
    """

    def build(self, config: SpecPeftConfig, model: Any) -> Mapping[str, Tensor]:
        assert isinstance(config, PPDConfig)
        distances, ept = config.num_prompt_tokens, config.num_ept
        tensors = {"prompts": _text_embeddings(model, distances * ept)}
        if config.ept_aggregation == "learned":
            tensors["weights"] = torch.full((distances, ept), 1 / ept)
        if config.num_prefix_tokens:
            tensors |= config.fresh_states("prefix", distances * config.num_prefix_tokens, INIT_STD)
        # At first, the head changes nothing.
        hidden = output_features(model)[0]
        if config.head == "vocabulary":
            tensors["head"] = torch.zeros(config.known_tokens(model), hidden)
        elif config.head == "residual":
            if config.head_rank is None:
                tensors["head"] = torch.zeros(hidden, hidden)
            else:  # as in LoRA, one factor is zero
                rank = config.head_rank
                tensors["head_down"] = torch.randn(rank, hidden) / hidden**0.5
                tensors["head_up"] = torch.zeros(hidden, rank)
            tensors["head_bias"] = torch.zeros(hidden)
        return {**tensors, **config.fresh_shared(model, distances)}


def _text_embeddings(model: Any, count: int) -> Tensor:
    """Input embeddings of random tokens, ``(count, hidden)``."""
    (tokens, width), device = input_features(model), placement(model).device
    ids = torch.randint(tokens, (count,))
    if ids.is_meta or device.type == "meta":  # only shapes are needed
        return torch.randn(count, width) * INIT_STD
    with torch.no_grad():
        return model.get_input_embeddings()(ids.to(device)).float()
