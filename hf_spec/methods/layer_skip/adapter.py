"""The LAYER_SKIP adapter: its config, and low-rank updates of the drafting path if it has any."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.low_rank import LowRankLayer, fresh_factors
from hf_spec.methods.layer_skip.config import LayerSkipConfig


class LayerSkipAdapter(LowRankLayer):
    """Two factors for each linear module of the drafting path, or no weights at all.

    They apply only while drafting; the model's own outputs do not change.
    """

    def build(self, config: SpecPeftConfig, model: Any) -> Mapping[str, Tensor]:
        assert isinstance(config, LayerSkipConfig)
        return fresh_factors(config.draft_modules(model), config.draft_rank)

    def connect(self, adapter_name: str, config: SpecPeftConfig, model: nn.Module) -> None:
        assert isinstance(config, LayerSkipConfig)
        self.add_updates(
            adapter_name, config.draft_modules(model), config.draft_rank, config.draft_alpha,
            only_if_active=False,
        )  # fmt: skip
