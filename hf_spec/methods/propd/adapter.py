"""The PROPD adapter's parameters: heads, and the early head that prunes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.drafting.heads import WEIGHTS, HeadsAdapter
from hf_spec.methods.propd.early_head import BIAS, GAIN, MATRIX


class ProPDAdapter(HeadsAdapter):
    """The parameters of the heads, and ``early_matrix`` (hidden, hidden), ``early_bias`` (hidden,)
    and ``early_gain`` (hidden,) of the early head."""

    def build(self, config: SpecPeftConfig, model: Any) -> Mapping[str, Tensor]:
        tensors = dict(super().build(config, model))
        hidden = tensors[WEIGHTS].shape[-1]
        inside = model.config.get_text_config(decoder=True).hidden_size
        if inside != hidden:
            raise ValueError(
                f"{type(model).__name__} has layers of size {inside} and output embeddings of "
                f"{hidden}: an early head would have to be projected. Use medusa."
            )
        early = {
            MATRIX: torch.zeros(hidden, hidden),
            BIAS: torch.zeros(hidden),
            GAIN: torch.ones(hidden),
        }
        return {**tensors, **early}
