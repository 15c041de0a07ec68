"""Config of a PPD adapter: Chen, "Parallel Prompt Decoding: A Cost-Effective and Memory-Efficient
Approach for Accelerating LLM Inference" (2024), chapter 4."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from hf_spec.adapters.config import setting
from hf_spec.adapters.predicting import FrontConfig
from hf_spec.core.checks import check_choices, check_count, check_range
from hf_spec.core.limits import MAX_FRONT, MAX_FUTURE, MAX_PROBES, MAX_RANK
from modeling_patches.layer_skip import num_layers

MASKS = ("ensemble", "decoder", "encoder")
AGGREGATIONS = ("average", "learned")
LOSSES = ("distillation", "hard")
HEADS = ("none", "vocabulary", "residual")
#: With two stages, share of the steps that train everything but the head.
FIRST_STAGE = 0.5


@dataclass
class PPDConfig(FrontConfig):
    """Config of a PPD adapter: prompt tokens that draft.

    Raises:
        ValueError: if a field is invalid.
    """

    type_name: ClassVar[str] = "PPD"

    num_prompt_tokens: int = setting(3, "m, prompt tokens, each drafting one future token.")
    num_ept: int = setting(1, "n, ensemble prompt tokens (EPTs) per prompt token.")
    ept_mask: str = setting(
        "ensemble",
        "Which other EPTs an EPT sees. ensemble: the one of its own number in each earlier prompt "
        "token. decoder: all before it. encoder: all of earlier prompt tokens and of its own.",
    )
    ept_aggregation: str = setting("average", "How EPTs are combined: average, or learned weights.")
    loss: str = setting(
        "distillation",
        "distillation: KL divergence from the base's own distributions. hard: cross-entropy of the "
        "answers' tokens.",
    )
    decay: float = setting(0.8, "alpha; the weight of distance i in the loss is alpha^(i-1).")
    num_prefix_tokens: int = setting(
        0,
        "Learned keys and values in every layer for each prompt token, which alone sees them "
        "(prefix tuning).",
    )
    head: str = setting(
        "none",
        "A decoding head for prompt tokens. none: the base's. vocabulary: a second output layer. "
        "residual: a block of hidden size before the base's.",
    )
    head_rank: int | None = setting(
        None,
        "Rank of a residual head's matrix; a low one keeps the adapter below 0.1 % of the base.  "
        "[default: a full matrix]",
    )
    head_stages: int = setting(
        2,
        "1: the head is trained from the first step. 2: the head is trained in the second half of "
        "the steps, together with the rest.",
    )
    num_exits: int = setting(
        1, "Last layers whose hidden states are averaged (multi-exit ensemble)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_prompt_tokens", self.num_prompt_tokens, high=MAX_FUTURE)
        check_count("num_ept", self.num_ept, high=MAX_PROBES // self.num_prompt_tokens)
        most = MAX_FRONT // self.num_prompt_tokens
        check_count("num_prefix_tokens", self.num_prefix_tokens, low=0, high=most)
        check_count("num_exits", self.num_exits)
        check_count("head_stages", self.head_stages, high=2)
        check_range("decay", self.decay, 0.0, 1.0, open_low=True)
        check_choices(self, ept_mask=MASKS, ept_aggregation=AGGREGATIONS, loss=LOSSES, head=HEADS)
        if self.head_rank is not None:
            check_count("head_rank", self.head_rank, high=MAX_RANK)
            if self.head != "residual":
                raise ValueError(
                    f"head_rank={self.head_rank} with head={self.head!r}: only residual heads have "
                    "a rank. Give head='residual', or leave head_rank out."
                )
        if self.num_ept == 1 and self.ept_aggregation == "learned":
            raise ValueError(
                "ept_aggregation='learned' with num_ept=1: there is nothing to weigh. Give at "
                "least 2 EPTs, or ept_aggregation='average'."
            )

    def untrained(self, progress: float) -> frozenset[str]:
        waits = self.head_stages == 2 and progress < FIRST_STAGE
        parts = {"head", "head_down", "head_up", "head_bias"}
        return frozenset(parts) if waits else frozenset()

    @property
    def reads_head(self) -> bool:
        return self.head != "vocabulary"

    def check_base(self, model: nn.Module) -> None:
        """Set defaults that depend on the base model; raise a ValueError if it does not fit."""
        super().check_base(model)
        if self.num_exits > 1 and self.num_exits > num_layers(model):
            raise ValueError(
                f"num_exits={self.num_exits}: the model has {num_layers(model)} layers."
            )
        if self.num_prefix_tokens:
            self.record_shape(model)
