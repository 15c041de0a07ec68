"""The EAGLE3 adapter: a decoder of one or few layers, and its config.

Names of parameters are those of published checkpoints: ``fc``, ``layers.i.*``, ``norm``,
``lm_head``; with some configs ``embed_tokens``, ``input_norm``, ``fc_norm.j``, ``mask_hidden``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_spec.adapters.base_model import facts_of
from hf_spec.adapters.config import setting
from hf_spec.adapters.module import Adapter
from hf_spec.adapters.predicting import VocabularyConfig
from hf_spec.core.checks import (
    check_choices,
    check_count,
    check_range,
    check_switches,
    distinct_layers,
)
from hf_spec.core.limits import MAX_BLOCKS, MAX_FUTURE, MAX_SHAPE, MAX_SIZE
from hf_spec.drafting.draft_vocabulary import DraftVocabulary
from hf_spec.drafting.layer_types import ARCHITECTURES, LAYER_TYPES, SIZES, LayerType
from hf_spec.drafting.training_time_test import LOSSES
from modeling_patches.cache_name import CACHE
from modeling_patches.modules import num_layers
from modeling_patches.weights import device_of, input_features, output_features

#: What changes the numbers, and no shapes but those of the norms.
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
#: Standard deviation of a new adapter's matrices.
INITIAL = 0.02


@dataclass
class Eagle3Config(VocabularyConfig):
    """Config of an EAGLE3 adapter; sizes that are left out are those of the base.

    Raises:
        ValueError: a field is invalid; the message names it, its value and the rule.
    """

    type_name: ClassVar[str] = "EAGLE3"
    layers: list[int] | None = setting(
        None,
        "Hidden states that it reads, numbered as in output_hidden_states. Default: 2, L // 2 and "
        "L - 3 of L layers.",
    )
    architecture: str = setting("llama", "Type of its decoder layers: llama, qwen3 or gemma4_text.")
    num_layers: int = setting(1, "Its decoder layers.")
    hidden_size: int | None = setting(None, "Width of its hidden states. Default: the base's.")
    intermediate_size: int | None = setting(None, "Width of its MLPs. Default: the base's.")
    num_attention_heads: int | None = setting(None, "Attention heads. Default: the base's.")
    num_key_value_heads: int | None = setting(None, "Key-value heads. Default: the base's.")
    head_dim: int | None = setting(None, "Dimension of a head. Default: the base's.")
    hidden_act: str = setting("silu", "Activation of its MLPs.")
    rms_norm_eps: float = setting(1e-6, "Epsilon of its norms.")
    rope_parameters: dict[str, Any] | None = setting(
        None, "Rotary embedding, as in configs of Transformers. Default: theta 10000."
    )
    max_position_embeddings: int | None = setting(None, "Longest text. Default: the base's.")
    attention_k_eq_v: bool = setting(
        False, "Whether values are keys, which layers of gemma4_text can have (recorded)."
    )
    logit_softcap: float | None = setting(
        None, "c: its logits x become c * tanh(x / c) (recorded)."
    )
    norm_before_residual: bool = setting(
        False, "Whether the first layer's residual is the normed feature."
    )
    norm_before_fc: bool = setting(False, "Whether the states that it reads are normed together.")
    fc_norm: bool = setting(False, "Whether each of the states that it reads is normed (3.1).")
    norm_output: bool = setting(
        False, "Whether the next row takes its output after the norm (3.1)."
    )
    mask_token_id: int | None = setting(
        None,
        "Token of rows that draft all further tokens in one forward (P-EAGLE); None: none.",
    )
    own_embeddings: bool = setting(False, "Whether it has input embeddings of its own.")
    embedding_scale: float | None = setting(
        None,
        "Factor of the rows of the embedding matrix; None: the base's module says what becomes of "
        "them (recorded).",
    )
    ttt_steps: int = setting(7, "Steps of the training-time test.")
    decay: float = setting(0.8, "Weight of step s in the loss is decay ** s, s from 0.")
    loss: str = setting(
        "kl",
        "kl: KL divergence from the base's distributions. ce: cross-entropy of the tokens that are "
        "likeliest by them.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            self.layers = distinct_layers("layers", self.layers)
        check_choices(self, architecture=ARCHITECTURES, loss=LOSSES, hidden_act=tuple(ACT2FN))
        check_count("num_layers", self.num_layers, high=MAX_BLOCKS)
        for name in SIZES:
            if getattr(self, name) is not None:
                most = MAX_SIZE if name == "max_position_embeddings" else MAX_SHAPE
                check_count(name, getattr(self, name), high=most)
        check_range("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0, open_low=True)
        check_switches(self, *FLAGS, "own_embeddings", "attention_k_eq_v")
        if self.attention_k_eq_v and "attention_k_eq_v" not in self.layer_type.own:
            raise ValueError(f"attention_k_eq_v=True: layers of {self.architecture} have values.")
        for name in ("embedding_scale", "logit_softcap"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0.0, MAX_SIZE, open_low=True)
        check_count("ttt_steps", self.ttt_steps, high=MAX_FUTURE)
        check_range("decay", self.decay, 0.0, 1.0, open_low=True)
        if self.mask_token_id is not None:
            check_count("mask_token_id", self.mask_token_id, low=0, high=MAX_SIZE)
        if self.rope_parameters is not None:
            _check_rope(self.rope_parameters)
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads and groups and heads % groups:
            raise ValueError(
                f"num_attention_heads={heads}: must be a multiple of num_key_value_heads={groups}."
            )
        if self.head_dim and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, as halves are rotated.")

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        count, (tokens, embedding) = num_layers(model), input_features(model)
        if self.mask_token_id is not None and self.mask_token_id >= tokens:
            raise ValueError(
                f"mask_token_id={self.mask_token_id}: the model has the tokens 0 to {tokens - 1}. "
                "Choose one of these."
            )
        layers = self.layers
        if layers is None:
            layers = sorted({min(2, count), count // 2, max(count - 3, 1)})
        if not layers or max(layers) > count:
            raise ValueError(
                f"layers={layers}: the model has {count} layers, whose hidden states are numbered "
                f"0 to {count}. Choose among these."
            )
        self.layers = layers
        for name, value in self._sizes_like(model).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.hidden_size != embedding and not self.own_embeddings:
            raise ValueError(
                f"hidden_size={self.hidden_size}: the base's embeddings have {embedding} "
                "dimensions. Choose this number, or own_embeddings=True."
            )

    def _sizes_like(self, model: Any) -> dict[str, int]:
        """`SIZES` of a base model."""
        text = model.config.get_text_config(decoder=True)
        fields, hidden = text.to_dict(), self.hidden_size or input_features(model)[1]

        def known(name: str) -> int | None:
            # Not by attribute: some differ from layer to layer, and raise.
            value = getattr(self, name) or fields.get(text.attribute_map.get(name, name))
            return value if type(value) is int and value > 0 else None

        heads = known("num_attention_heads") or 0
        if not heads or hidden % heads or (hidden // heads) % 2:
            heads = next(n for n in range(max(hidden // 64, 1), 0, -1) if hidden % (2 * n) == 0)
        groups = known("num_key_value_heads") or heads
        dim = known("head_dim") or 0
        return {
            "hidden_size": hidden,
            "intermediate_size": known("intermediate_size") or 4 * hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": groups if heads % groups == 0 else heads,
            "head_dim": dim if dim and dim % 2 == 0 else hidden // heads,
            "max_position_embeddings": known("max_position_embeddings") or 2048,
        }

    @property
    def layer_type(self) -> LayerType:
        """The type of its decoder layers."""
        return LAYER_TYPES[self.architecture]

    def of_layers(self) -> PreTrainedConfig:
        """Transformers' config of its decoder layers."""
        kind = self.layer_type
        fields = {name: getattr(self, name) for name in (*SIZES, *kind.own)} | {
            "hidden_act": self.hidden_act, "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": dict(self.rope_parameters or DEFAULT_ROPE),
        }  # fmt: skip
        return kind.config(fields, self.num_layers)


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _check_rope(given: Any) -> None:
    kinds = ("default", *ROPE_INIT_FUNCTIONS)
    kind = given.get("rope_type") if isinstance(given, dict) else None
    if kind not in kinds:
        raise ValueError(
            f"rope_parameters={given!r}: must be a dict with rope_type, one of {', '.join(kinds)}, "
            "and rope_theta."
        )
    check_range("rope_parameters['rope_theta']", given.get("rope_theta"), 0.0, open_low=True)


class Eagle3Adapter(Adapter):
    """The decoder's parameters, and its forward."""

    def __init__(self, config: Eagle3Config, model: Any) -> None:
        super().__init__(config, model)
        of_layers, kind = config.of_layers(), config.layer_type
        hidden, eps = of_layers.hidden_size, config.rms_norm_eps
        width = facts_of(model).get("hidden_size", input_features(model)[1])  # of its states
        count = len(config.layers or ())
        if config.norm_before_fc:
            self.input_norm = kind.norm(count * width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(kind.norm(width, eps) for _ in range(count))
        self.fc = nn.Linear(count * width, hidden, bias=False)
        self.layers = nn.ModuleList(
            kind.layer(of_layers, index) for index in range(config.num_layers)
        )
        first: Any = self.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):  # of embedding and feature
            made = getattr(first.self_attn, name)
            if made is not None:
                of_both = nn.Linear(2 * hidden, made.out_features, bias=False)
                setattr(first.self_attn, name, of_both)
        first.hidden_norm = kind.norm(hidden, eps)
        self.norm = kind.norm(hidden, eps)
        known = config.known_tokens(model)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size or known, bias=False)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, count * width))
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(known, hidden)
        self.hold(config.fresh_vocabulary())
        #: By device; not among the buffers, which have the dtype of the adapter.
        self._rotary: dict[torch.device, nn.Module] = {}
        if not config.inference_mode:  # otherwise the weights are loaded later
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=INITIAL)
            if config.mask_token_id is not None:
                nn.init.normal_(self.mask_hidden, std=INITIAL)
            self._start_head(torch.arange(self.lm_head.out_features), model)

    @torch.no_grad()
    def _start_head(self, tokens: Tensor, model: Any) -> None:
        """Let the output matrix start as the base's rows of these tokens, if it has such."""
        own = self.lm_head.weight
        if not own.is_meta and output_features(model)[0] == own.shape[1]:
            own.copy_(DraftVocabulary(tokens, model).weight)

    def set_vocabulary(self, tokens: Tensor, model: Any) -> None:
        super().set_vocabulary(tokens, model)
        self._start_head(tokens, model)

    def fused(self, states: Tensor) -> Tensor:
        """``(batch, n, hidden)`` what a row takes of the base's states ``(batch, n, features)``."""
        states = states.to(device_of(self.fc), self.fc.weight.dtype)
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], -1)
        return self.fc(states)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows of the decoder (EAGLE-3, section 3.1); see :class:`DraftNetwork`.

        Args:
            embeddings: ``(batch, n, hidden)`` of the rows' tokens.
        """
        device = hidden.device
        embeddings, positions, mask = embeddings.to(hidden), positions.to(device), mask.to(device)
        given = {
            "position_embeddings": self._rotary_on(device)(hidden, positions),
            "attention_mask": mask, CACHE: cache,
        }  # fmt: skip
        layers: Any = self.layers
        kind = self.config.layer_type
        for index, layer in enumerate(layers):
            inputs = layer.input_layernorm(hidden if index else embeddings)
            if not index:
                normed = layer.hidden_norm(hidden)
                inputs = torch.cat([inputs, normed], -1)
                hidden = normed if self.config.norm_before_residual else hidden
            attended = layer.self_attn(inputs, **given, **kind.given())[0]
            hidden = kind.rest(layer, hidden, attended)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden

    def _rotary_on(self, device: torch.device) -> nn.Module:
        if device not in self._rotary:
            with torch.device(device):
                self._rotary[device] = self.config.layer_type.rotary(self.config.of_layers())
        return self._rotary[device]
