"""What a PPD adapter holds: Chen, "Parallel Prompt Decoding: A Cost-Effective and Memory-Efficient
Approach for Accelerating LLM Inference" (2024), chapter 4."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from hf_spec.adapters.predicting import FrontConfig
from hf_spec.core.checks import check_choices, check_count, check_range
from hf_spec.core.limits import MAX_FRONT, MAX_FUTURE, MAX_PROBES, MAX_RANK
from modeling_patches.layer_skip import num_layers

MASKS = ("ensemble", "decoder", "encoder")
AGGREGATIONS = ("average", "learned")
LOSSES = ("distillation", "hard")
HEADS = ("none", "vocabulary", "residual")
#: Share of the steps that train everything but the head, where there are two stages.
FIRST_STAGE = 0.5


@dataclass
class PPDConfig(FrontConfig):
    """Config of a PPD adapter.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    type_name: ClassVar[str] = "PPD"

    num_prompt_tokens: int = field(
        default=3, metadata={"help": "m, future tokens drafted besides the certain one."}
    )
    num_ept: int = field(
        default=1, metadata={"help": "n, ensemble prompt tokens (EPTs) per prompt token."}
    )
    ept_mask: str = field(
        default="ensemble",
        metadata={
            "help": "What an EPT sees of the others. ensemble: the one of its own number in each "
            "prompt token before. decoder: all before it. encoder: all of the prompt tokens before "
            "and of its own."
        },
    )
    ept_aggregation: str = field(
        default="average",
        metadata={"help": "How EPTs make one prediction: average, or learned weights."},
    )
    loss: str = field(
        default="distillation",
        metadata={
            "help": "distillation: towards the base's own distributions. hard: cross-entropy of "
            "the answers' tokens."
        },
    )
    decay: float = field(
        default=0.8, metadata={"help": "alpha: distance i counts alpha^(i-1) in the loss."}
    )
    num_prefix_tokens: int = field(
        default=0,
        metadata={
            "help": "Learned keys and values in every layer that each prompt token, and no other, "
            "sees (prefix tuning)."
        },
    )
    head: str = field(
        default="none",
        metadata={
            "help": "A decoding head of the prompt tokens' own. none: the base's. vocabulary: a "
            "second output layer. residual: a block of hidden size before the base's."
        },
    )
    head_rank: int | None = field(
        default=None,
        metadata={
            "help": "Rank of a residual head's matrix, which keeps the adapter below 0.1 % of the "
            "base.  [default: a full matrix]"
        },
    )
    head_stages: int = field(
        default=2,
        metadata={
            "help": "1: the head is trained from the first step. 2: it is trained, with all else, "
            "in the second half of the steps."
        },
    )
    num_exits: int = field(
        default=1,
        metadata={"help": "Last layers whose hidden states are averaged (multi-exit ensemble)."},
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
        """Record what follows from the base model, or raise ValueError if it does not fit."""
        super().check_base(model)
        if self.num_exits > 1 and self.num_exits > num_layers(model):
            raise ValueError(
                f"num_exits={self.num_exits}: the model has {num_layers(model)} layers."
            )
        if self.num_prefix_tokens:
            self.record_shape(model)
