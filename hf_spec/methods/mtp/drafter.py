"""Drafts with the layers for multi-token prediction of the model's own checkpoint.

Level by level, as trees of EAGLE-3 grow: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024),
sections 2.2 and 5.4.3; Gloeckle et al., "Better & Faster Large Language Models via Multi-token
Prediction" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_spec.adapters.active import find_active
from hf_spec.drafting.autoregressive import AutoregressiveDrafter
from hf_spec.drafting.forward_drafter import GrowOptions
from hf_spec.drafting.options import key_of
from hf_spec.methods.mtp.network import MtpNetwork
from hf_spec.methods.mtp.weights import mtp_layers
from hf_spec.model.hidden_states import Reads


@dataclass(frozen=True)
class MtpOptions(GrowOptions):
    """Options of ``mtp``: those of all strategies that grow a tree level by level.

    Attributes:
        width: draft tokens of a level that are continued, the likeliest ones.
    """


class MtpDrafter(AutoregressiveDrafter):
    """The model's own layers, on its final states, predict one token after the other; those of an
    active adapter, which has fine-tuned them, if there is one."""

    network: MtpNetwork
    options: MtpOptions

    def __init__(self, model: Any, options: MtpOptions):
        adapter = find_active(model, "MTP")
        layers = mtp_layers(model) if adapter is None else adapter.module.placed()
        key = "mtp", None if adapter is None else adapter.name, key_of(options)
        network = MtpNetwork(model, layers)
        super().__init__(model, options, network, Reads("committed"), key)
