"""Types of decoder layers that drafters have, and what differs between them.

A type is named as Transformers names the model that such layers are of. All of them take the fields
of Llama's config, under its names; :meth:`LayerType.flat` finds these in a checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

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
        found: type[Any] = CONFIG_MAPPING[self.name]
        return found

    def layer(self, config: Any, index: int) -> nn.Module:
        return LlamaDecoderLayer(config, index)

    def norm(self, size: int, eps: float) -> nn.Module:
        return LlamaRMSNorm(size, eps)

    def rotary(self, config: Any) -> nn.Module:
        """Angles of positions: ``(states, positions)`` -> cosines and sines."""
        return LlamaRotaryEmbedding(config)

    def config(self, fields: Mapping[str, Any], count: int) -> PreTrainedConfig:
        """Transformers' config of so many layers."""
        made: PreTrainedConfig = self.config_class()(
            **fields, num_hidden_layers=count, vocab_size=1, pad_token_id=None, bos_token_id=None,
            eos_token_id=None, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        return made

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
        found: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return found


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
        found: Tensor = (hidden + layer.post_feedforward_layernorm(inner)) * layer.layer_scalar
        return found


#: By the model type of a checkpoint's layers.
LAYER_TYPES: dict[str, LayerType] = {
    "llama": LayerType(), "qwen3": Qwen3(), "gemma4_text": Gemma4(),
    "gemma4_unified_text": Gemma4(),
}  # fmt: skip
#: Their names.
ARCHITECTURES = tuple(dict.fromkeys(kind.name for kind in LAYER_TYPES.values()))
