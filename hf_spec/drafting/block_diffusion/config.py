"""The config of a block drafter's adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from hf_spec.adapters.base_model import facts_of
from hf_spec.adapters.config import setting
from hf_spec.adapters.predicting import VocabularyConfig
from hf_spec.core.checks import check_choices, check_count, check_range, check_switches
from hf_spec.core.limits import MAX_BLOCKS, MAX_FUTURE, MAX_RANK, MAX_SHAPE, MAX_SIZE
from hf_spec.drafting.layer_types import LAYER_TYPES, SIZES, LayerType
from modeling_patches.modules import num_layers
from modeling_patches.weights import input_features, output_features

SELECTOR = "selector"
MARKOV_HEADS = ("vanilla", "gated", "rnn", SELECTOR)
CONFIDENCE_HEADS = ("none", "state", "markov")
HEADS, LOSSES, WINDOWS = ("base", "own"), ("hard", "distillation"), ("anchor", "query")
#: What released drafters call fields of ours.
SCALES = {
    "embedding_scale": "input_embedding_scale", "logit_scale": "output_multiplier",
    "logit_softcap": "final_logit_softcapping",
}  # fmt: skip
#: Fields of ``layer_config``, as Transformers' ``Qwen3Config`` names them.
LAYER_FIELDS = (*SIZES, "hidden_act", "rms_norm_eps", "attention_bias", "rope_parameters")
#: Field of ``layer_config`` with the type of its layers, and the types; the first is the default,
#: which needs no such field.
TYPE, TYPES = "model_type", ("qwen3", "gemma4_text")
#: Layers of the base that are read by default.
NUM_FEATURES = 3


@dataclass
class BlockConfig(VocabularyConfig):
    """Config of an adapter that predicts a block of tokens.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    block_size: int = setting(8, "Tokens of a block: the anchor, the root of a tree, and masks.")
    num_layers: int = setting(2, "Layers of the drafter.")
    sample_from_anchor: bool = setting(
        False,
        "True: each slot of a block predicts the token after its own, the anchor's slot included. "
        "False: each mask's slot predicts its own token.",
    )
    markov_rank: int = setting(0, "Rank of the Markov head; 0: none.")
    markov_head: str = setting(
        "vanilla",
        "vanilla: the token before changes the predictions. gated: by more or less, as the slot's "
        "state says. rnn: all drafted tokens before do. selector: as gated, among each slot's "
        "likeliest tokens only (DFlash 2).",
    )
    selector_top_k: int = setting(16, "Tokens of a slot among which a selector chooses.")
    conv_kernel_size: int = setting(
        0, "Slots that convolutions around attention and MLPs see (DFlash 2); 0: none."
    )
    conv_group_size: int = setting(16, "Features that share the moving part of a convolution.")
    loss: str = setting(
        "hard",
        "hard: cross-entropy of the answer's tokens. distillation: KL divergence from the model's "
        "own distributions.",
    )
    decay: float = setting(0.8, "Weight of distance d in the loss is decay ** d.")
    feature_layers: list[int] | None = setting(
        None,
        "Layers of the base that are read, as output_hidden_states numbers them; None: three, "
        "evenly spaced.",
    )
    mask_token_id: int | None = setting(
        None, "Token of the base's vocabulary that stands for a mask; None: the last one."
    )
    head: str = setting("base", "base: the base's output embeddings. own: a matrix (recorded).")
    confidence_head: str = setting(
        "none",
        "What a head of confidence reads: a slot's state, or that and the token before; trees are "
        "grown by it, next to a Markov head (recorded).",
    )
    embedding_scale: float = setting(
        1.0, "Factor of the base's embeddings, as its weights give them (recorded)."
    )
    logit_scale: float = setting(1.0, "Factor of the logits (recorded).")
    logit_softcap: float | None = setting(
        None, "c: logits x, which are scaled, become c * tanh(x / c) (recorded)."
    )
    layer_config: dict[str, Any] | None = setting(
        None,
        "Fields of the config of its layers, which are Qwen3's unless model_type says that "
        "they are those of gemma4_text (recorded).",
    )
    sliding_layers: list[int] | None = setting(None, "Layers with a sliding window (recorded).")
    sliding_window: int | None = setting(None, "Size of the window (recorded).")
    sliding_window_from: str = setting(
        "anchor", "anchor: a block has one window. query: each slot has its own (recorded)."
    )
    sliding_window_non_causal: bool = setting(
        True, "Whether slots of layers with a window see those behind them (recorded)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("block_size", self.block_size, low=2, high=MAX_FUTURE)
        check_count("num_layers", self.num_layers, high=MAX_BLOCKS)
        check_count("markov_rank", self.markov_rank, low=0, high=MAX_RANK)
        check_count("selector_top_k", self.selector_top_k, high=MAX_SHAPE)
        check_count("conv_kernel_size", self.conv_kernel_size, low=0, high=self.block_size)
        check_count("conv_group_size", self.conv_group_size, high=MAX_SHAPE)
        check_range("decay", self.decay, 0.0, 1.0, open_low=True)
        for name in SCALES:
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0.0, MAX_SIZE, open_low=True)
        check_switches(self, "sample_from_anchor", "sliding_window_non_causal")
        check_choices(
            self, markov_head=MARKOV_HEADS, loss=LOSSES, head=HEADS,
            confidence_head=CONFIDENCE_HEADS, sliding_window_from=WINDOWS,
        )  # fmt: skip
        if self.mask_token_id is not None:
            check_count("mask_token_id", self.mask_token_id, low=0, high=MAX_SIZE)
        if self.feature_layers is not None:
            _check_layers("feature_layers", self.feature_layers)
        if self.sliding_layers is not None:
            _check_layers("sliding_layers", self.sliding_layers, self.num_layers)
        if self.sliding_window is not None:
            check_count("sliding_window", self.sliding_window, high=MAX_SIZE)
        if self.sliding_layers and self.sliding_window is None:
            raise ValueError(
                f"sliding_layers={self.sliding_layers!r}: these need a sliding_window."
            )
        if self.confidence_head == "markov" and not self.markov_rank:
            raise ValueError("confidence_head='markov' needs a Markov head: set markov_rank.")
        if self.layer_config is not None:
            self._check_layer_config(self.layer_config)
            self._check_convolutions(self.layer_config["hidden_size"])

    def _check_convolutions(self, hidden: int) -> None:
        name = (self.layer_config or {}).get(TYPE, TYPES[0])
        if self.conv_kernel_size and name != TYPES[0]:
            raise ValueError(
                f"conv_kernel_size={self.conv_kernel_size}: convolutions stand in layers of "
                f"{TYPES[0]}, not in those of {name}. Set it to 0."
            )
        if self.conv_kernel_size and hidden % self.conv_group_size:
            raise ValueError(
                f"conv_group_size={self.conv_group_size}: {hidden} features cannot be divided into "
                "such groups."
            )

    @staticmethod
    def _check_layer_config(fields: Any) -> None:
        name = fields.get(TYPE, TYPES[0]) if isinstance(fields, dict) else TYPES[0]
        if name not in TYPES:
            raise ValueError(
                f"layer_config has {TYPE}={name!r}: layers of {' and '.join(TYPES)} are known."
            )
        wanted = (*LAYER_FIELDS, *LAYER_TYPES[name].own)
        if not isinstance(fields, dict) or {*fields} - {TYPE} != {*wanted}:
            raise ValueError(f"layer_config={fields!r}: must be a dict of {', '.join(wanted)}.")
        try:
            for size in SIZES:
                check_count(size, fields[size], high=MAX_SIZE if "max" in size else MAX_SHAPE)
            check_range("rms_norm_eps", fields["rms_norm_eps"], 0.0, 1.0, open_low=True)
            for flag in ("attention_bias", *LAYER_TYPES[name].own):
                if type(fields[flag]) is not bool:
                    raise ValueError(f"{flag}={fields[flag]!r}: must be True or False.")
            if fields["hidden_act"] not in ACT2FN:
                raise ValueError(f"hidden_act={fields['hidden_act']!r}: is not known.")
            heads, of_keys = fields["num_attention_heads"], fields["num_key_value_heads"]
            if heads % of_keys:
                raise ValueError(f"{heads} heads are no multiple of {of_keys} key-value heads.")
            config_of(fields, 1)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"layer_config: {' '.join(str(error).split())}") from error

    @property
    def distances(self) -> int:
        """How many tokens after the root it predicts."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def shapes_logits(self) -> bool:
        """Whether it says how logits are scaled or capped; otherwise the base's are as its own."""
        return self.logit_scale != 1.0 or self.logit_softcap is not None

    def check_base(self, model: nn.Module) -> None:
        """Raise ValueError if the base is of another shape; record what the saved config needs."""
        super().check_base(model)
        known, width = input_features(model)
        out, vocab = output_features(model)
        facts = facts_of(model)
        hidden, layers = facts.get("hidden_size", width), num_layers(model)
        if not width == out == hidden:
            raise ValueError(
                f"{type(model).__name__} has input embeddings of {width}, states of {hidden} and "
                f"output embeddings of {out} features: a block drafter takes all three, and needs "
                "them to be of one size. Choose another strategy."
            )
        if self.layer_config is None:
            self.layer_config = default_layers(model)
            self._check_convolutions(hidden)
        elif self.layer_config["hidden_size"] != hidden:
            raise ValueError(
                f"its layers have hidden_size={self.layer_config['hidden_size']}, "
                f"{type(model).__name__} has {hidden}: give the base model that it was made for."
            )
        if self.feature_layers is None:
            self.feature_layers = default_features(layers)
        if max(self.feature_layers) > layers:
            raise ValueError(
                f"feature_layers={self.feature_layers}: {type(model).__name__} has states 0 to "
                f"{layers}. Give the base model that it was made for."
            )
        if self.mask_token_id is None:
            self.mask_token_id = min(known, vocab) - 1
        if self.mask_token_id >= known:
            raise ValueError(
                f"mask_token_id={self.mask_token_id}: {type(model).__name__} has {known} input "
                "embeddings. Give the base model that it was made for, with the tokens added that "
                "it was trained with."
            )

    @property
    def layer_type(self) -> LayerType:
        """The type of its layers."""
        return LAYER_TYPES[(self.layer_config or {}).get(TYPE, TYPES[0])]

    def layers(self) -> Any:
        """Transformers' config of its layers."""
        assert self.layer_config is not None
        return config_of(self.layer_config, self.num_layers)


def _check_layers(name: str, layers: Any, end: int | None = None) -> None:
    if not isinstance(layers, list) or (end is None and not layers):
        raise ValueError(f"{name}={layers!r}: must be a list of layers.")
    for layer in layers:
        check_count(name, layer, low=0, high=MAX_SHAPE if end is None else end - 1)
    if layers != sorted({*layers}):
        raise ValueError(f"{name}={layers!r}: must be in ascending order, each layer once.")


def config_of(fields: dict[str, Any], num_layers: int) -> Any:
    """Transformers' config of so many layers."""
    kind = LAYER_TYPES[fields.get(TYPE, TYPES[0])]
    return kind.config({name: one for name, one in fields.items() if name != TYPE}, num_layers)


def default_layers(model: Any) -> dict[str, Any]:
    """``layer_config`` of a new adapter: layers of the size of the base's."""
    text: Any = model.config.get_text_config(decoder=True)
    facts = facts_of(model)
    hidden, heads = facts["hidden_size"], getattr(text, "num_attention_heads", 8)
    inner, rope = getattr(text, "intermediate_size", None), getattr(text, "rope_parameters", None)
    dim = text.to_dict().get("head_dim")  # as an attribute, Gemma 4 has one for each layer
    theta = rope.get("rope_theta", 10000.0) if isinstance(rope, dict) else 10000.0
    shared = facts.get("num_key_value_heads", heads)
    return {
        "hidden_size": hidden,
        "intermediate_size": inner if isinstance(inner, int) else 4 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if heads % shared else shared,
        # Rotary embeddings rotate pairs.
        "head_dim": dim if isinstance(dim, int) else max(hidden // heads // 2 * 2, 2),
        "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
    }


def default_features(layers: int) -> list[int]:
    """Layers that are read, as far apart as can be: neither the first states nor the final ones,
    if there are enough."""
    low, high = min(2, layers), max(layers - 2, 1)
    if high <= low:
        low, high = 1, layers
    steps = [low + (high - low) * place / (NUM_FEATURES - 1) for place in range(NUM_FEATURES)]
    return sorted({round(step) for step in steps})
