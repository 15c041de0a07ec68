"""Parameters that adapters share which predict future tokens: transitions, and states in front."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.core.checks import check_count, check_range
from hf_spec.core.limits import MAX_RANK, MAX_SHAPE
from modeling_patches.support import kv_shape

#: What an adapter has that ``hf-spec train`` makes, unless the user says.
TRAINED = {"transition_rank": 128}
#: Names of the parameters.
BEFORE, AFTER, STATE = "transition_before", "transition_after", "transition_state"


@dataclass
class TransitionConfig(SpecPeftConfig):
    """Config of an adapter that may have a transition."""

    transition_rank: int = field(
        default=0,
        metadata={
            "help": "Of what predictions learn from the token before theirs; 0: nothing, as in the "
            "paper."
        },
    )

    transition_learning_rate: float = field(
        default=3e-3, metadata={"help": "Its peak in training; cosine schedule."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(
            "transition_learning_rate", self.transition_learning_rate, 0.0, 1.0, open_low=True
        )
        check_count("transition_rank", self.transition_rank, low=0, high=MAX_RANK)

    def learning_rates(self) -> dict[str, float]:
        return {"transition": self.transition_learning_rate} if self.transition_rank else {}

    def fresh_transition(self, model: nn.Module) -> dict[str, Tensor]:
        """``transition_before`` (rank, embedding), ``transition_state`` (rank, hidden) and
        ``transition_after`` (hidden, rank): the bias is 0 at first. Nothing for rank 0."""
        rank = self.transition_rank
        if not rank:
            return {}
        base: Any = model
        embedding, hidden = base.get_input_embeddings().weight.shape[1], _width(base)
        return {
            BEFORE: torch.randn(rank, embedding) / embedding**0.5,
            STATE: torch.randn(rank, hidden) / hidden**0.5,
            AFTER: torch.zeros(hidden, rank),
        }


@dataclass
class FrontConfig(TransitionConfig):
    """Base of configs of adapters with learned keys and values: they have the cache's shape."""

    num_layers: int | None = field(
        default=None, metadata={"help": "Layers of the base's cache; recorded."}
    )
    num_kv_heads: int | None = field(
        default=None, metadata={"help": "Key-value heads of the base; recorded."}
    )
    head_dim: int | None = field(
        default=None, metadata={"help": "Dimension of the base's heads; recorded."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), high=MAX_SHAPE)

    def record_shape(self, model: nn.Module) -> None:
        """Record the shape of the base's cache, unless an adapter that is loaded brings it."""
        if not (self.inference_mode and self.num_layers):
            self.num_layers, self.num_kv_heads, self.head_dim = kv_shape(model)

    def fresh_states(self, name: str, slots: int, std: float) -> dict[str, Tensor]:
        """``<name>_keys`` and ``<name>_values``, ``(layers, kv_heads, slots, head_dim)`` each."""
        assert self.num_layers and self.num_kv_heads and self.head_dim
        shape = (self.num_layers, self.num_kv_heads, slots, self.head_dim)
        return {f"{name}_{part}": torch.randn(shape) * std for part in ("keys", "values")}


def _width(model: Any) -> int:
    """Of final hidden states: what the output embeddings take."""
    taken: int = model.get_output_embeddings().in_features
    return taken
