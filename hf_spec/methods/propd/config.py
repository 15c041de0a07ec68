"""Config of a PROPD adapter: Zhong et al., "ProPD: Dynamic Token Tree Pruning and Generation for
LLM Parallel Decoding" (2024), section 4.1, on the heads of Medusa."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from hf_spec.adapters.config import setting
from hf_spec.core.checks import check_count
from hf_spec.drafting.heads import HeadsConfig
from modeling_patches.layer_skip import num_layers

#: Default number of layers before pruning (section 5.3).
PRUNE_LAYER = 4


@dataclass
class ProPDConfig(HeadsConfig):
    """Config of a PROPD adapter.

    Raises:
        ValueError: a field is invalid; the message names it, its value and the rule.
    """

    type_name: ClassVar[str] = "PROPD"

    prune_layer: int | None = setting(
        None,
        "Layers that run on the whole tree; the early prediction head reads the hidden states "
        f"behind them.  [default: {PRUNE_LAYER}, or all but one where there are fewer]",
    )
    prune_top_k: int = setting(
        50, "k: candidates that are not among the early head's k likeliest tokens are dropped."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prune_layer is not None:
            check_count("prune_layer", self.prune_layer)
        check_count("prune_top_k", self.prune_top_k)

    def check_base(self, model: nn.Module) -> None:
        """Set the default layer; raise a ValueError if the base model cannot be pruned there."""
        super().check_base(model)
        layers = num_layers(model)
        if layers < 2:
            raise ValueError(
                "the model has 1 layer: there are no deeper ones to leave candidates out of. Use "
                "medusa."
            )
        if self.prune_layer is None:
            self.prune_layer = min(PRUNE_LAYER, layers - 1)
        if self.prune_layer >= layers:
            raise ValueError(
                f"prune_layer={self.prune_layer}: the model has {layers} layers, so candidates can "
                f"be pruned behind 1 to {layers - 1} of them."
            )
