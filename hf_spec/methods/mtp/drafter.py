"""Drafts with the layers for multi-token prediction of the model's own checkpoint.

Level by level, as trees of EAGLE-3 grow: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024),
sections 2.2 and 5.4.3; Gloeckle et al., "Better & Faster Large Language Models via Multi-token
Prediction" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.checks import check_count
from hf_spec.core.limits import MAX_DRAFT_TOKENS
from hf_spec.core.memory import recall
from hf_spec.drafting.autoregressive import AutoregressiveDrafter
from hf_spec.drafting.options import CHAIN, DraftOptions, key_of, refuse
from hf_spec.drafting.state import DecodeState
from hf_spec.methods.mtp.network import MtpNetwork
from hf_spec.methods.mtp.weights import mtp_layers
from hf_spec.model.hidden_states import Reads
from hf_spec.policy.draft_exit import DraftExit
from hf_spec.policy.tempering import Tempering

#: Depth of the deepest draft token, unless `max_depth` is smaller.
DEPTH = 8


@dataclass(frozen=True)
class MtpOptions(DraftOptions):
    """Options of ``mtp``.

    Attributes:
        width: nodes of each level of a tree that are continued, the likeliest ones.
    """

    width: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("width", self.width, high=MAX_DRAFT_TOKENS)
        if self.tree == CHAIN:
            refuse(self, ["width"], f"with tree={CHAIN!r}, which has one. Leave one out.")


class MtpDrafter(AutoregressiveDrafter):
    """The model's own layers, on its final states, predict one token after the other."""

    network: MtpNetwork
    options: MtpOptions

    def __init__(self, model: Any, options: MtpOptions):
        network = MtpNetwork(model, mtp_layers(model))
        super().__init__(
            model, options, network, Reads("committed"), DEPTH, options.width, DraftExit(DEPTH),
            Tempering(),
        )  # fmt: skip

    def start(self, state: DecodeState) -> None:
        super().start(state)
        if state.timed:  # what must not depend on time must not depend on earlier calls either
            # Sampled text is harder to predict.
            key = "mtp", key_of(self.options), state.do_sample
            self.exit = recall(self.model, (DraftExit, *key), lambda: DraftExit(DEPTH))
            self.tempering = recall(self.model, (Tempering, *key), Tempering)

    def _run_true(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, cache: TreeCache
    ) -> tuple[Tensor, Tensor]:
        before = None if self._root is None else self._root[1]
        return self.network.run_true(tokens, hidden, before, positions, mask, cache)
