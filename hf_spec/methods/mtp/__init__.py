"""``mtp``: draft with the layers for multi-token prediction of the model's own checkpoint.

Level by level, as trees of EAGLE-3 grow: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024),
sections 2.2 and 5.4.3; Gloeckle et al., "Better & Faster Large Language Models via Multi-token
Prediction" (2024). An adapter is the layers, fine-tuned: a step of training runs them as drafting
does (:mod:`hf_spec.drafting.training_time_test`), and token embeddings, final norm and output
embeddings are the base's, which stay as they are.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_spec.adapters.active import find_active
from hf_spec.adapters.module import Adapter
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import count, setting
from hf_spec.core.limits import MAX_BLOCKS
from hf_spec.drafting.autoregressive import AutoregressiveDrafter
from hf_spec.drafting.forward_drafter import GrowOptions
from hf_spec.drafting.options import key_of
from hf_spec.drafting.training_time_test import ChainConfig, chain_loss
from hf_spec.methods.mtp.network import MtpNetwork
from hf_spec.methods.mtp.weights import mtp_layers
from hf_spec.methods.registry import Method
from hf_spec.model.hidden_states import Reads
from hf_spec.modeling_patches.mtp import MtpLayers

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
    num_layers: int | None = setting(
        None, "Layers for multi-token prediction (recorded).", count(1, MAX_BLOCKS)
    )
    sparse: bool = setting(False, "Whether their MLPs are mixtures of experts (recorded).")

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


def loss(model: Any, adapter: Any, batch: TrainingBatch) -> dict[str, Tensor]:
    """See :func:`chain_loss`."""
    layers = adapter.placed()
    for module in layers.layers.modules():
        # Blocks that compute activations anew leave the cache out.
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    return chain_loss(model, MtpNetwork(model, layers), batch, adapter.config)


class MtpDrafter(AutoregressiveDrafter):
    """The model's own layers, on its final states, predict one token after the other; those of an
    active adapter, which has fine-tuned them, if there is one."""

    network: MtpNetwork
    options: GrowOptions

    def __init__(self, model: Any, options: GrowOptions):
        adapter: Any = find_active(model, "MTP", options.adapter)
        layers = mtp_layers(model) if adapter is None else adapter.placed()
        key = "mtp", None if adapter is None else adapter.name, key_of(options)
        network = MtpNetwork(model, layers)
        super().__init__(model, options, network, Reads("committed"), key)
        self.beside = (layers.layers,) if adapter is None else ()


METHOD = Method(
    name="mtp",
    summary="the checkpoint's own layers for multi-token prediction, as they are or fine-tuned",
    options=GrowOptions,
    drafter=MtpDrafter,
    adapter_config=MtpConfig,
    adapter_module=MtpAdapter,
    objective=loss,
    included=mtp_layers,
    formats="hf_spec.tools.formats.mtp",
    # Below the rates of new layers, as these are trained already.
    training={"learning_rate": 3e-4, "num_train_epochs": 2, "optim": "muon"},
    num_anchors=32,
)
