"""The LAYER_SKIP adapter: its config, and low-rank updates of the drafting path if it has any."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.layer import SpecAdapterLayer
from hf_spec.adapters.low_rank import adapter_low_rank, fresh_factors
from hf_spec.methods.layer_skip.config import LayerSkipConfig
from modeling_patches.low_rank import LowRank


class LayerSkipAdapter(SpecAdapterLayer):
    """Two factors for each linear module of the drafting path, or no weights at all.

    They apply only while drafting; the model's own outputs do not change.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.updates: dict[str, LowRank] = {}  # by adapter, for drafting to attach

    def build(self, config: SpecPeftConfig, model: Any) -> Mapping[str, Tensor]:
        assert isinstance(config, LayerSkipConfig)
        return fresh_factors(config.draft_modules(model), config.draft_rank)

    def connect(self, adapter_name: str, config: SpecPeftConfig, model: nn.Module) -> None:
        assert isinstance(config, LayerSkipConfig)
        modules = config.draft_modules(model)
        if modules:
            scale = config.draft_alpha / config.draft_rank
            self.updates[adapter_name] = adapter_low_rank(
                self, adapter_name, modules, scale, only_if_active=False
            )

    def delete_adapter(self, adapter_name: str) -> None:
        self.updates.pop(adapter_name, None)
        super().delete_adapter(adapter_name)
