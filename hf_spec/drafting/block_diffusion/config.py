"""The config of a block drafter's adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from hf_spec.adapters.base_model import facts_of
from hf_spec.adapters.predicting import ObjectiveConfig
from hf_spec.core.checks import check_count, choice, count, distinct_layers, setting
from hf_spec.core.limits import MAX_FUTURE, MAX_RANK, MAX_SHAPE, MAX_SIZE
from hf_spec.drafting.block_diffusion.heads import HEADS
from hf_spec.drafting.decoder import FACTOR, DecoderConfig
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.weights import input_features, output_features

#: Type of layers that can have convolutions.
CONVOLVED = "qwen3"
#: Layers of the base that are read by default.
NUM_READ = 3


@dataclass
class BlockConfig(ObjectiveConfig, DecoderConfig):
    """Config of an adapter that predicts a block of tokens.

    The layers that it reads are evenly spaced by default, its mask token is the base's last one,
    and its rotary embedding has the base's theta.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    of_layers: ClassVar[tuple[str, ...]] = (*DecoderConfig.of_layers, "attention_bias")

    architecture: str = "qwen3"
    block_size: int = setting(
        8, "Tokens of a block: the anchor, the root of a tree, and masks.", count(2, MAX_FUTURE)
    )
    num_layers: int = 2
    sample_from_anchor: bool = setting(
        False,
        "True: each slot of a block predicts the token after its own, the anchor's slot included. "
        "False: each mask's slot predicts its own token.",
    )
    causal: bool = setting(
        False,
        "Whether a slot of a block sees those before it and itself only (JetSpec), or all of them.",
    )
    markov_rank: int = setting(0, "Rank of the Markov head; 0: none.", count(0, MAX_RANK))
    markov_head: str = setting(
        "vanilla",
        "vanilla: the token before changes the predictions. gated: by more or less, as the slot's "
        "state says. rnn: all drafted tokens before do. selector: as gated, among each slot's "
        "likeliest tokens only (DFlash 2). domino: a recurrent state of all drafted tokens does. "
        "dspine: slots pass on what they would draft, layer by layer; causal. xpress: a mixer over "
        "the slots and the tokens before them.",
        choice(*HEADS),
    )
    markov_width: int = setting(
        512,
        "Width inside a head: of domino's recurrent state, dspine's messages, xpress' MLP.",
        count(1, MAX_SHAPE),
    )
    markov_skips: int = setting(
        1, "Distances at first that domino leaves as they are.", count(0, MAX_FUTURE)
    )
    selector_top_k: int = setting(
        16, "Tokens of a slot among which a selector, or dspine, chooses.", count(1, MAX_SHAPE)
    )
    conv_kernel_size: int = setting(
        0, "Slots that convolutions around attention and MLPs see (DFlash 2); 0: none."
    )
    conv_group_size: int = setting(
        16, "Features that share the moving part of a convolution.", count(1, MAX_SHAPE)
    )
    head: str = setting(
        "base", "base: the base's output embeddings. own: a matrix (recorded).",
        choice("base", "own"),
    )  # fmt: skip
    confidence_head: str = setting(
        "none",
        "What a head of confidence reads: a slot's state, or that and the token before; trees are "
        "grown by it, next to a Markov head (recorded).",
        choice("none", "state", "markov"),
    )
    embedding_scale: float | None = 1.0
    logit_scale: float = setting(1.0, "Factor of the logits, before their cap (recorded).", FACTOR)
    attention_bias: bool = setting(False, "Whether attention has biases (recorded).")
    sliding_layers: list[int] | None = setting(None, "Layers with a sliding window (recorded).")
    sliding_window: int | None = setting(None, "Size of the window (recorded).", count(1, MAX_SIZE))
    sliding_window_from: str = setting(
        "anchor", "anchor: a block has one window. query: each slot has its own (recorded).",
        choice("anchor", "query"),
    )  # fmt: skip
    sliding_window_non_causal: bool = setting(
        True, "Whether slots of layers with a window see those behind them (recorded)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("conv_kernel_size", self.conv_kernel_size, low=0, high=self.block_size)
        if self.sliding_layers is not None:
            self.sliding_layers = distinct_layers("sliding_layers", self.sliding_layers)
            for layer in self.sliding_layers:
                check_count("sliding_layers", layer, low=0, high=self.num_layers - 1)
        if self.sliding_layers and self.sliding_window is None:
            raise ValueError(
                f"sliding_layers={self.sliding_layers!r}: these need a sliding_window."
            )
        if self.is_causal_always:
            self.causal = True
            if self.sample_from_anchor:
                raise ValueError(
                    f"sample_from_anchor=True with markov_head={self.markov_head!r}: its masks' "
                    "slots predict their own tokens. Set it to False."
                )
        if self.confidence_head == "markov" and not self.markov_rank:
            raise ValueError("confidence_head='markov' needs a Markov head: set markov_rank.")
        if self.conv_kernel_size and self.architecture != CONVOLVED:
            raise ValueError(
                f"conv_kernel_size={self.conv_kernel_size}: convolutions stand in layers of "
                f"{CONVOLVED}, not in those of {self.architecture}. Set it to 0."
            )
        self._check_groups()

    def _check_groups(self) -> None:
        if self.conv_kernel_size and (self.hidden_size or 0) % self.conv_group_size:
            raise ValueError(
                f"conv_group_size={self.conv_group_size}: {self.hidden_size} features cannot be "
                "divided into such groups."
            )

    @property
    def distances(self) -> int:
        """How many tokens after the root it predicts."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def is_causal_always(self) -> bool:
        """Whether its head is made for causal blocks only."""
        return bool(self.markov_rank) and HEADS[self.markov_head].causal

    @property
    def shapes_logits(self) -> bool:
        """Whether it says how logits are scaled or capped; otherwise the base's are as its own."""
        return self.logit_scale != 1.0 or self.logit_softcap is not None

    def _defaults(self, model: Any) -> dict[str, Any]:
        rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None)
        theta = rope.get("rope_theta", 10000.0) if isinstance(rope, dict) else 10000.0
        return {
            "layers": default_layers(num_layers(model)),
            "mask_token_id": min(input_features(model)[0], output_features(model)[1]) - 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
            **super()._defaults(model),
        }

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        self._check_groups()
        if self.markov_head == "dspine":
            why = "It has no more directions: hidden_size is the limit of dspine's rank."
            check_count("markov_rank", self.markov_rank, 0, self.hidden_size, why)
        width, out = input_features(model)[1], output_features(model)[0]
        hidden = facts_of(model).get("hidden_size", width)
        if not width == out == hidden:
            raise ValueError(
                f"{type(model).__name__} has input embeddings of {width}, states of {hidden} and "
                f"output embeddings of {out} features: a block drafter takes all three, and needs "
                "them to be of one size. Choose another strategy."
            )
        if self.hidden_size != hidden:
            raise ValueError(
                f"hidden_size={self.hidden_size}: {type(model).__name__} has {hidden}. Give the "
                "base model that it was made for."
            )


def default_layers(count: int) -> list[int]:
    """Layers of a base with so many that are read, as far apart as can be: neither the first states
    nor the final ones, if there are enough."""
    low, high = min(2, count), max(count - 2, 1)
    if high <= low:
        low, high = 1, count
    steps = [low + (high - low) * place / (NUM_READ - 1) for place in range(NUM_READ)]
    return sorted({round(step) for step in steps})
