"""Config of a BITA adapter: Lin et al., "BiTA: Bi-Directional Tuning for Lossless Acceleration in
Large Language Models" (2024), section 3.1."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from hf_spec.adapters.config import setting
from hf_spec.adapters.predicting import FrontConfig
from hf_spec.core.checks import check_choices, check_count
from hf_spec.core.limits import MAX_FRONT, MAX_FUTURE

DEPTHS = ("deep", "shallow", "none")
#: Models with more parameters get four mask tokens (section 4.1).
LARGE = 13e9


@dataclass
class BitaConfig(FrontConfig):
    """Config of a BITA adapter: mask tokens that draft, and prompt tokens that only they attend to.

    Raises:
        ValueError: if a field is invalid.
    """

    type_name: ClassVar[str] = "BITA"

    num_mask_tokens: int | None = setting(
        None,
        "M, mask tokens, each drafting one future token. Default: 3, or 4 for a base model of more "
        "than 13 billion parameters.",
    )
    num_prompt_tokens: int = setting(16, "P, learned prompt tokens that only mask tokens see.")
    prompt_depth: str = setting(
        "deep",
        "deep: learned keys and values in every layer. shallow: learned input embeddings. none: "
        "mask tokens only.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_mask_tokens is not None:
            check_count("num_mask_tokens", self.num_mask_tokens, high=MAX_FUTURE)
        check_count("num_prompt_tokens", self.num_prompt_tokens, low=0, high=MAX_FRONT)
        check_choices(self, prompt_depth=DEPTHS)
        if self.prompt_depth == "none":
            self.num_prompt_tokens = 0
        elif not self.num_prompt_tokens:
            raise ValueError(
                f"prompt_depth={self.prompt_depth!r} with num_prompt_tokens=0: give at least 1, "
                "or prompt_depth='none'."
            )

    def check_base(self, model: nn.Module) -> None:
        """Set defaults that depend on the base model; raise a ValueError if it does not fit."""
        super().check_base(model)
        if self.num_mask_tokens is None:
            parameters = sum(p.numel() for p in model.parameters())
            self.num_mask_tokens = 4 if parameters > LARGE else 3
        if self.prompt_depth == "deep":
            self.record_shape(model)
