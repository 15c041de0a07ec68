"""Config of a SPACE adapter: Yi et al., "Generation Meets Verification: Accelerating Large
Language Model Inference with Smart Parallel Auto-Correct Decoding" (2024), section 3.1."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from hf_spec.adapters.config import setting
from hf_spec.adapters.low_rank import DOWN, UP, check_settings
from hf_spec.adapters.predicting import PredictingConfig
from hf_spec.core.checks import check_choices, check_count, check_range
from hf_spec.core.limits import MAX_FUTURE
from modeling_patches.low_rank import linear_modules, output_projections
from modeling_patches.support import check_unquantised

UPDATES = ("gated", "lora", "full", "none")
MASKS = ("learned", "noise")
#: Learning rate by kind of update; that of ``full`` is the paper's (table 2). Mask tokens alone are
#: soft prompts, which need a higher one.
LEARNING_RATES = {"gated": 3e-3, "lora": 1e-3, "full": 5e-5, "none": 3e-2}


@dataclass
class SpaceConfig(PredictingConfig):
    """Config of a SPACE adapter.

    Raises:
        ValueError: a field is invalid; the message names it, its value and the rule.
    """

    type_name: ClassVar[str] = "SPACE"
    num_mask_tokens: int = setting(5, "k, mask tokens, each drafting one future token.")
    shared_mask: bool = setting(
        False, "One embedding for all mask tokens, as in the paper, instead of k."
    )
    masks: str = setting(
        "learned",
        "learned: mask tokens have embeddings of their own. noise: random tokens of the vocabulary "
        "stand in their place, with gated updates only, which is what SGLang drafts with.",
    )
    p_ar: float = setting(
        0.5, "Share of autoregressive sequences in training; 1 is plain fine-tuning."
    )
    update: str = setting(
        "gated",
        "What is trained besides the mask tokens. gated: low-rank updates of mask tokens only; the "
        "model's output stays the same. lora: low-rank updates of the model, and full: all its "
        "weights, saved beside the adapter; both fine-tune the model, as in the paper. none: "
        "nothing.",
    )
    rank: int = setting(16, "Rank of the low-rank updates.")
    update_learning_rate: float = setting(
        5e-3, "Peak learning rate of gated updates; mask tokens have that of training."
    )
    alpha: float = setting(32, "The updates are scaled by alpha / rank.")
    target_modules: list[str] | str | None = setting(
        None,
        "Linear modules that get low-rank updates: names, or a regular expression. Default: all in "
        "the decoder layers; for gated updates the last one of each layer.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_mask_tokens", self.num_mask_tokens, high=MAX_FUTURE)
        check_range("p_ar", self.p_ar, 0.0, 1.0)
        if not isinstance(self.shared_mask, bool):
            raise ValueError(f"shared_mask={self.shared_mask!r}: must be True or False.")
        check_choices(self, update=UPDATES, masks=MASKS)
        if self.masks == "noise" and (self.update != "gated" or self.shared_mask):
            raise ValueError(
                f"masks='noise' with update={self.update!r} and shared_mask={self.shared_mask}: "
                "random tokens are told from text by gated updates alone, and have no embedding to "
                "share. Take update='gated' and shared_mask=False, or masks='learned'."
            )
        check_settings("", self.rank, self.alpha, self.target_modules)
        if self.target_modules is not None and not isinstance(self.target_modules, str):
            self.target_modules = sorted(self.target_modules)

    @property
    def trains_base(self) -> bool:
        return self.update == "full"

    def training_defaults(self) -> dict[str, Any]:
        if self.update == "none" and self.p_ar == 1:
            raise ValueError(
                "update='none' with p_ar=1.0: nothing is trained. Lower p_ar, or choose another "
                "update."
            )
        rate = {"learning_rate": LEARNING_RATES[self.update]}
        if not self.changes_model:
            return {**rate, "num_train_epochs": 8}
        # The checkpoint of the lowest loss is kept: tau would favour models that repeat themselves,
        # which are easy to predict. Epochs are those of table 2.
        return {**rate, "metric_for_best_model": "loss", "greater_is_better": False}

    def learning_rates(self) -> dict[str, float]:
        gated = self.update == "gated"
        own = dict.fromkeys((DOWN, UP), self.update_learning_rate) if gated else {}
        return {**super().learning_rates(), **own}

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules of `model` that have low-rank updates, by name."""
        if self.update == "gated" and self.target_modules is None:
            return output_projections(model)
        low_rank = self.update in ("gated", "lora")
        return linear_modules(model, self.target_modules) if low_rank else {}

    @property
    def changes_model(self) -> bool:  # type: ignore[override]
        """Whether the adapter changes the model's output."""
        return self.update in ("lora", "full")

    def check_base(self, model: nn.Module) -> None:
        """Raise a ValueError if `model` cannot have these updates; replace a pattern by names."""
        super().check_base(model)
        found = self.modules(model)
        if isinstance(self.target_modules, str):  # PEFT would match it again, however long it takes
            self.target_modules = sorted(found) or None
        elif self.target_modules is None and self.update == "gated":
            # What the default means may change; what a trained adapter has must not.
            ends = sorted({name.rpartition(".")[2] for name in found})
            alike = linear_modules(model, ends).keys() == found.keys()
            self.target_modules = ends if alike else sorted(found)
        if self.trains_base and not self.inference_mode:
            check_unquantised(model, "update='full'", "update='lora' or 'none'")
