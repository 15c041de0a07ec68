"""The MTP adapter: the fine-tuned layers for multi-token prediction, and its config and loss.

A step of training runs the layers as drafting does (:mod:`hf_spec.drafting.training_time_test`).
Token embeddings, final norm and output embeddings are the base's, which stay as they are.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.config import setting
from hf_spec.adapters.module import Adapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import check_count, check_switches
from hf_spec.core.limits import MAX_BLOCKS
from hf_spec.drafting.training_time_test import ChainConfig, chain_loss
from hf_spec.methods.mtp.network import MtpNetwork
from hf_spec.methods.mtp.weights import mtp_layers
from modeling_patches.mtp import MtpLayers

#: Steps of the training-time test, if there are not more layers.
STEPS = 4


@dataclass
class MtpConfig(ChainConfig):
    """Config of an MTP adapter: fine-tuned layers of the base's own checkpoint.

    Raises:
        ValueError: a field is invalid; the message names it, its value and the rule.
    """

    type_name: ClassVar[str] = "MTP"
    shards: ClassVar[bool] = False
    num_layers: int | None = setting(None, "Layers for multi-token prediction (recorded).")
    sparse: bool = setting(False, "Whether their MLPs are mixtures of experts (recorded).")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switches(self, "sparse")
        if self.num_layers is not None:
            check_count("num_layers", self.num_layers, high=MAX_BLOCKS)

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        if not (self.inference_mode and self.num_layers):
            layers = mtp_layers(model)
            self.num_layers, self.sparse = len(layers.layers), layers.sparse
        count = self.num_layers or 1
        if self.ttt_steps is None:
            self.ttt_steps = max(STEPS, count)
        if self.ttt_steps < count:
            raise ValueError(
                f"ttt_steps={self.ttt_steps}: the checkpoint has {count} layers for multi-token "
                f"prediction, one for each step. Take {count} or more, or all further ones would "
                "not be trained."
            )


class MtpAdapter(Adapter):
    """The layers, which start as those of the base's checkpoint."""

    def __init__(self, config: MtpConfig, model: Any) -> None:
        super().__init__(config, model)
        if config.inference_mode:  # the weights are loaded later
            made = MtpLayers(model, config.num_layers or 1, config.sparse)
            made.layers.to_empty(device=torch.get_default_device())
        else:
            made = copy.deepcopy(mtp_layers(model)).requires_grad_(True)
        self.layers = made.layers
        # Not a module of this one, as its rotary buffers are not to be cast.
        self.__dict__["_made"] = made

    def placed(self) -> MtpLayers:
        """The layers, all on their device."""
        made: MtpLayers = self.__dict__["_made"]
        first: Any = made.layers[0]
        made.place(first.eh_proj.weight.device)
        return made


def loss(model: Any, adapter: ActiveAdapter, batch: TrainingBatch) -> dict[str, Tensor]:
    """See :func:`chain_loss`."""
    layers = adapter.module.placed()
    for module in layers.layers.modules():
        # Blocks that compute activations anew leave the cache out.
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    return chain_loss(model, MtpNetwork(model, layers), batch, adapter.config)
