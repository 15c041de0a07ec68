"""Small decoders that draft, of the layer types of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from hf_spec.adapters.config import VocabularyConfig, facts_of, vocab_size
from hf_spec.adapters.layer import Adapter
from hf_spec.core.checks import (
    MAX_BLOCKS,
    MAX_SHAPE,
    MAX_SIZE,
    SHARE,
    UNFIT,
    check_range,
    choice,
    count,
    distinct_layers,
    explained,
    number,
    setting,
)
from hf_spec.modeling_patches.attention_masks import attention_beside
from hf_spec.modeling_patches.modules import CACHE, num_layers
from hf_spec.modeling_patches.weights import device_of, input_features, placement
from hf_spec.target.hidden_states import RowEmbeddings, soft_capped

# -- Types of decoder layers that drafters have, and what differs between them ---------------------
#
# A type is named as Transformers names the model that such layers are of. All of them take the
# fields of Llama's config, under its names; :meth:`LayerType.flat` finds these in a checkpoint's.

#: Fields of configs of layers that count something.
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip


class LayerType:
    """Layers of Llama.

    Attributes:
        name: the model type.
        own: fields of their config that Llama's lacks.
    """

    name = "llama"
    own: tuple[str, ...] = ()

    def config_class(self) -> type[Any]:
        return CONFIG_MAPPING[self.name]

    def layer(self, config: Any, index: int) -> nn.Module:
        return LlamaDecoderLayer(config, index)

    def norm(self, size: int, eps: float) -> nn.Module:
        return LlamaRMSNorm(size, eps)

    def rotary(self, config: Any) -> nn.Module:
        """Angles of positions: ``(states, positions)`` -> cosines and sines."""
        return LlamaRotaryEmbedding(config)

    def config(self, fields: Mapping[str, Any], count: int) -> PreTrainedConfig:
        """Transformers' config of so many layers."""
        return self.config_class()(
            **fields, num_hidden_layers=count, vocab_size=1, pad_token_id=None, bos_token_id=None,
            eos_token_id=None, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip

    def flat(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of a checkpoint, with fields of layers as Llama's config names them.

        Raises:
            ValueError: it says what such layers do not have here.
        """
        if config.get("rope_parameters") is not None:
            return config
        scaling = config.get("rope_scaling") or {}  # before Transformers 5
        if not isinstance(scaling, Mapping):
            raise ValueError(f"config.json has rope_scaling={scaling!r}: it must be an object")
        rope = {"rope_type": scaling.get("type") or "default", **scaling}
        rope.pop("type", None)
        return {**config, "rope_parameters": {"rope_theta": config.get("rope_theta", 1e4), **rope}}

    def embedding_scale(self, hidden_size: int) -> float:
        """Factor of embeddings in models with such layers."""
        return 1.0

    def given(self) -> dict[str, Any]:
        """Further arguments of a layer's forward, and of its attention's."""
        return {}

    def keys_values(
        self, attention: Any, context: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Of context alone, as the attention's forward would make them.

        Args:
            context: ``(batch, n, hidden)``

        Returns:
            Both ``(batch, heads, n, head_dim)``.
        """
        shape = (*context.shape[:-1], -1, attention.head_dim)
        keys = attention.k_proj(context).view(shape)
        values = keys if attention.v_proj is None else attention.v_proj(context).view(shape)
        if hasattr(attention, "k_norm"):
            keys = attention.k_norm(keys)
        if hasattr(attention, "v_norm"):
            values = attention.v_norm(values)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return apply_rotary_pos_emb(keys[:, :0], keys, *angles)[1], values

    def rest(self, layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
        """What a layer does after its attention, with the residual and the attention's output."""
        hidden = hidden + attended
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


class Qwen3(LayerType):
    """Layers of Qwen3: queries and keys are normed."""

    name = "qwen3"

    def layer(self, config: Any, index: int) -> nn.Module:
        return Qwen3DecoderLayer(config, index)


class Gemma4(LayerType):
    """Layers of Gemma 4 with full attention, dense and with keys and values of their own.

    Sublayers are normed before and after, values are normed, scores are not scaled, and the output
    has a factor. With ``attention_k_eq_v`` values are the keys before norm and rotation.
    """

    name = "gemma4_text"
    own = ("attention_k_eq_v",)

    def layer(self, config: Any, index: int) -> nn.Module:
        from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer

        return Gemma4TextDecoderLayer(config, index)

    def norm(self, size: int, eps: float) -> nn.Module:
        from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

        return Gemma4RMSNorm(size, eps)

    def rotary(self, config: Any) -> nn.Module:
        shape = {"hidden_size": config.hidden_size, "head_dim": config.head_dim}
        rope = dict(config.rope_parameters["full_attention"])
        longest = config.max_position_embeddings
        return LlamaRotaryEmbedding(
            LlamaConfig(**shape, rope_parameters=rope, max_position_embeddings=longest)
        )

    def config(self, fields: Mapping[str, Any], count: int) -> PreTrainedConfig:
        rest = dict(fields)
        return super().config(
            {
                "hidden_activation": rest.pop("hidden_act"),
                # Heads of full attention, and of the sliding one, which no layer has.
                "global_head_dim": rest["head_dim"],
                "num_global_key_value_heads": rest["num_key_value_heads"],
                "rope_parameters": {"full_attention": rest.pop("rope_parameters")},
                "layer_types": ["full_attention"] * count,
                "hidden_size_per_layer_input": 0,
                **rest,
            },
            count,
        )

    def flat(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers"):
            if config.get(name):
                raise ValueError(
                    f"config.json has {name}={config[name]!r}: layers of {self.name} are read "
                    "without"
                )
        kinds = config.get("layer_types")
        if not isinstance(kinds, list) or any(one != "full_attention" for one in kinds):
            raise ValueError(
                f"config.json has layer_types={kinds!r}: layers of {self.name} "
                "with full attention are read"
            )
        rope = config.get("rope_parameters")
        if not isinstance(rope, Mapping) or not isinstance(rope.get("full_attention"), Mapping):
            raise ValueError(
                f"config.json has rope_parameters={rope!r}, which must say those of full_attention"
            )
        dim, equal = config.get("global_head_dim"), config.get("attention_k_eq_v", False)
        if type(dim) is not int:
            raise ValueError(f"config.json has global_head_dim={dim!r}: must be a whole number")
        shared = config.get("num_global_key_value_heads") if equal else None
        return {
            **config,
            "head_dim": dim,
            "num_key_value_heads": shared or config.get("num_key_value_heads"),
            "hidden_act": config.get("hidden_activation"),
            "rope_parameters": dict(rope["full_attention"]),
            "attention_k_eq_v": equal,
        }

    def embedding_scale(self, hidden_size: int) -> float:
        return float(hidden_size**0.5)

    def given(self) -> dict[str, Any]:
        return {"shared_kv_states": {}}

    def rest(self, layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + layer.post_attention_layernorm(attended)
        inner = layer.mlp(layer.pre_feedforward_layernorm(hidden))
        return (hidden + layer.post_feedforward_layernorm(inner)) * layer.layer_scalar


#: By the model type of a checkpoint's layers.
LAYER_TYPES: dict[str, LayerType] = {
    "llama": LayerType(), "qwen3": Qwen3(), "gemma4_text": Gemma4(),
    "gemma4_unified_text": Gemma4(),
}  # fmt: skip
#: Their names.
ARCHITECTURES = tuple(dict.fromkeys(kind.name for kind in LAYER_TYPES.values()))


# --------------------------------------------------------------------------------------------------
# A small decoder that drafts from its base's hidden states: config, parameters, and parts of its
# forward that :mod:`~hf_spec.methods.eagle3` and :mod:`~hf_spec.predict` share.
#
# It reads the states of some layers of the base at a token, side by side, which a matrix fuses. Its
# layers are those of a model that Transformers has (:class:`LayerType`). A method subclasses
# config, parameters and network for what it adds, and says what its rows see.

#: Rules of sizes and of factors.
SIZE, FACTOR = count(1, MAX_SHAPE), number(0.0, MAX_SIZE, open_low=True)
#: What ``rope_parameters=None`` means.
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass
class DecoderConfig(VocabularyConfig):
    """Config of an adapter that is a decoder; what is left out is as the base has it.

    Raises:
        ValueError: a field is invalid; the message names it, its value and the rule.
    """

    #: Fields that configs of its layers have, too.
    of_layers: ClassVar[tuple[str, ...]] = (*SIZES, "hidden_act", "rms_norm_eps")

    layers: list[int] | None = setting(
        None,
        "Hidden states of the base that it reads, numbered as in output_hidden_states. Default: "
        "three of them.",
    )
    architecture: str = setting(
        "llama", f"Type of its decoder layers: {', '.join(ARCHITECTURES[:-1])} or "
        f"{ARCHITECTURES[-1]}.",
        choice(*ARCHITECTURES),
    )  # fmt: skip
    num_layers: int = setting(1, "Its decoder layers.", count(1, MAX_BLOCKS))
    hidden_size: int | None = setting(
        None, "Width of its hidden states. Default: the base's.", SIZE
    )
    intermediate_size: int | None = setting(None, "Width of its MLPs. Default: the base's.", SIZE)
    num_attention_heads: int | None = setting(None, "Attention heads. Default: the base's.", SIZE)
    num_key_value_heads: int | None = setting(None, "Key-value heads. Default: the base's.", SIZE)
    head_dim: int | None = setting(None, "Dimension of a head. Default: the base's.", SIZE)
    hidden_act: str = setting("silu", "Activation of its MLPs.", choice(*ACT2FN))
    rms_norm_eps: float = setting(1e-6, "Epsilon of its norms.", SHARE)
    rope_parameters: dict[str, Any] | None = setting(
        None, "Rotary embedding, as in configs of Transformers. Default: theta 10000."
    )
    max_position_embeddings: int | None = setting(
        None, "Longest text. Default: the base's.", count(1, MAX_SIZE)
    )
    attention_k_eq_v: bool = setting(
        False, "Whether values are keys, which layers of gemma4_text can have (recorded)."
    )
    mask_token_id: int | None = setting(None, "Token of mask rows; None: none.", count(0, MAX_SIZE))
    embedding_scale: float | None = setting(
        None,
        "Factor of the rows of the embedding matrix; None: the base's module says what becomes of "
        "them (recorded).",
        FACTOR,
    )
    logit_softcap: float | None = setting(
        None, "c: its logits x become c * tanh(x / c) (recorded).", FACTOR
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            self.layers = distinct_layers("layers", self.layers)
        if self.attention_k_eq_v and "attention_k_eq_v" not in self.layer_type.own:
            raise ValueError(f"attention_k_eq_v=True: layers of {self.architecture} have values.")
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
        """Raise ValueError if the base is of another shape; record what the saved config needs."""
        super().check_base(model)
        count = num_layers(model)
        for name, value in self._defaults(model).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.check_mask(model)
        with torch.device("cpu"), explained(f"rope_parameters={self.rope_parameters!r}", *UNFIT):
            self.layer_type.rotary(self.layer_config())
        if not self.layers or max(self.layers) > count:
            raise ValueError(
                f"layers={self.layers}: the model has {count} layers, whose hidden states are "
                f"numbered 0 to {count}. Choose among these."
            )

    def check_mask(self, model: nn.Module) -> None:
        """Raise ValueError if the base has no embedding of the mask token, as it was made for
        another one, or its vocabulary was cut since."""
        tokens, mask = input_features(model)[0], self.mask_token_id
        if mask is not None and mask >= tokens:
            raise ValueError(
                f"mask_token_id={mask}: the model has the tokens 0 to {tokens - 1}. Choose one of "
                f"these; if the {type(self).type_name} adapter is trained and the model has lost "
                f"tokens since, give them back: resize_token_embeddings({mask + 1})."
            )

    def alternatives(self, model: nn.Module) -> list[dict[str, Any]]:
        """Layers numbered from one more, as by their outputs, or one less; see
        :class:`SpecPeftConfig`."""
        shifted = [[layer + by for layer in self.layers or ()] for by in (1, -1)]
        count = num_layers(model)
        return [
            {"layers": layers}
            for layers in shifted if layers and min(layers) >= 0 and max(layers) <= count
        ]  # fmt: skip

    def _defaults(self, model: Any) -> dict[str, Any]:
        """Values of fields that are None, by the base model."""
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

    def layer_config(self) -> PreTrainedConfig:
        """Transformers' config of its decoder layers."""
        kind = self.layer_type
        fields = {name: getattr(self, name) for name in (*self.of_layers, *kind.own)}
        fields["rope_parameters"] = dict(self.rope_parameters or DEFAULT_ROPE)
        with explained(f"rope_parameters={self.rope_parameters!r}", *UNFIT):
            return kind.config(fields, self.num_layers)


def _check_rope(given: Any) -> None:
    kinds = ("default", *ROPE_INIT_FUNCTIONS)
    kind = given.get("rope_type") if isinstance(given, dict) else None
    if kind not in kinds:
        raise ValueError(
            f"rope_parameters={given!r}: must be a dict with rope_type, one of {', '.join(kinds)}, "
            "and rope_theta."
        )
    check_range("rope_parameters['rope_theta']", given.get("rope_theta"), 0.0, open_low=True)


class Decoder(Adapter):
    """The parameters, by their names in released checkpoints.

    ``fc.weight`` (hidden, layers read * the base's hidden), ``layers.i.*`` as in models with such
    layers, and ``norm.weight``; if not all tokens are predicted, ``draft_vocabulary`` (tokens,),
    int64 ids in ascending order; with a head of its own, ``lm_head.weight`` (tokens, hidden).

    Attributes:
        width: of the base's hidden states.
        known: number of tokens that come in.
    """

    config: DecoderConfig

    def __init__(self, config: DecoderConfig, model: Any, own_head: bool) -> None:
        super().__init__(config, model)
        layers = config.layer_config()
        hidden = layers.hidden_size
        self.target_hidden = facts_of(model).get("hidden_size", hidden)
        self.known = config.known_tokens(model)
        self.fc = nn.Linear(len(config.layers or ()) * self.target_hidden, hidden, bias=False)
        self.layers = nn.ModuleList(self.layer(layers, i) for i in range(config.num_layers))
        self.norm = self.rms_norm(hidden)
        if own_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size or self.known, bias=False)
        self.hold(config.fresh_vocabulary())
        #: By device; not among the buffers, which have the dtype of the adapter.
        self._rotary: dict[torch.device, nn.Module] = {}

    def layer(self, layers: Any, index: int) -> nn.Module:
        """A new decoder layer, by Transformers' config of all."""
        return self.config.layer_type.layer(layers, index)

    def rms_norm(self, size: int) -> nn.Module:
        """A new norm."""
        return self.config.layer_type.norm(size, self.config.rms_norm_eps)

    def rotary(self, device: torch.device) -> nn.Module:
        """Its rotary embedding: ``(states, positions)`` -> cosines and sines."""
        if device not in self._rotary:
            with torch.device(device):
                made = self.config.layer_type.rotary(self.config.layer_config())
            self._rotary[device] = made
        return self._rotary[device]


class DecoderNetwork:
    """A decoder on its base model, whose vocabulary may have been resized.

    Attributes:
        num_layers: of its cache.

    Raises:
        ValueError: the model has no mask token any more.
    """

    def __init__(self, model: Any, adapter: Any):
        adapter.config.check_mask(model)
        self.model, self.adapter, self.config = model, adapter, adapter.config
        self.num_layers = len(adapter.layers)
        # Of weights that accelerate has offloaded, too.
        self.device, self.dtype = device_of(adapter.fc), adapter.fc.weight.dtype
        self._kind, self._rotary = self.config.layer_type, adapter.rotary(self.device)
        for layer in adapter.layers:
            layer.self_attn.config._attn_implementation = attention_beside(model)
            # Layers that compute activations anew leave the cache out.
            layer.gradient_checkpointing = False
        base = model.get_input_embeddings()
        self._place, self._embed = placement(model).device, base
        if self.config.embedding_scale is not None:
            self._embed = RowEmbeddings(model)
        if (own := getattr(adapter, "embed_tokens", None)) is not None:
            self._place, self._embed, count = self.device, own, own.num_embeddings
            if count < input_features(model)[0]:  # later tokens look like the last one
                self._embed = lambda tokens: own(tokens.clamp(max=count - 1))

    def fused(self, states: Tensor) -> Tensor:
        """``(batch, n, hidden)`` of the base's states ``(batch, n, features)`` at the layers that
        it reads."""
        return self.adapter.fc(states.to(self.device, self.dtype))

    def embedded(self, tokens: Tensor) -> Tensor:
        """``(batch, n, hidden)`` input embeddings of tokens ``(batch, n)``."""
        found: Tensor = self._embed(tokens.to(self._place)).to(self.device, self.dtype)
        scale = self.config.embedding_scale
        return found if scale in (None, 1.0) else found * scale

    def inputs(self, angles: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> dict[str, Any]:
        """What a layer's forward takes besides hidden states.

        Args:
            angles: of the rows' positions, see :meth:`Decoder.rotary`.
            mask: see :class:`~hf_spec.predict.network.Rows`.
        """
        own = self._kind.given()
        return {"position_embeddings": angles, "attention_mask": mask, CACHE: cache, **own}

    def shaped(self, logits: Tensor) -> Tensor:
        """Cap logits, as the decoder says."""
        return soft_capped(logits, self.config.logit_softcap)

    def logits(self, states: Tensor) -> Tensor:
        """``(..., tokens)`` by its own head, of normed states ``(..., hidden)``."""
        logits: Tensor = self.adapter.lm_head(states)
        if not self.config.draft_vocab_size:  # the model may have lost tokens
            logits = logits[..., : vocab_size(self.model)]
        return self.shaped(logits)
