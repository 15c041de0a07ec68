"""``mtp``: draft with the layers for multi-token prediction of the model's own checkpoint.

Level by level, as trees of EAGLE-3 grow: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024),
sections 2.2 and 5.4.3; Gloeckle et al., "Better & Faster Large Language Models via Multi-token
Prediction" (2024).
"""

from typing import Any

from hf_spec.adapters.active import find_active
from hf_spec.drafting.autoregressive import AutoregressiveDrafter
from hf_spec.drafting.forward_drafter import GrowOptions
from hf_spec.drafting.options import key_of
from hf_spec.methods.mtp.adapter import MtpAdapter, MtpConfig, loss
from hf_spec.methods.mtp.network import MtpNetwork
from hf_spec.methods.mtp.weights import mtp_layers
from hf_spec.methods.registry import Method
from hf_spec.model.hidden_states import Reads


class MtpDrafter(AutoregressiveDrafter):
    """The model's own layers, on its final states, predict one token after the other; those of an
    active adapter, which has fine-tuned them, if there is one."""

    network: MtpNetwork
    options: GrowOptions

    def __init__(self, model: Any, options: GrowOptions):
        adapter = find_active(model, "MTP")
        layers = mtp_layers(model) if adapter is None else adapter.module.placed()
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
    formats="hf_spec.formats.mtp",
    # The layers are trained already, so that rates of new ones would undo what they know.
    training={"learning_rate": 1e-4, "num_train_epochs": 2},
    num_anchors=32,
)
