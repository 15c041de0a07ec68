"""Reads released block drafters: the fields of their config and their tensors.

The known layouts name most tensors alike (:class:`BlockAdapter`); their configs differ:

* speculators: ``speculators_model_type``, with ``transformer_layer_config``. The numbers in
  ``aux_hidden_state_layer_ids`` are those of ``output_hidden_states``.
* z-lab and SpecForge: the config of Qwen3 layers with ``dflash_config``. ``target_layer_ids``
  number layers by their *outputs*, one less; without them, they are evenly spaced.
* DeepSpec: the same fields without ``dflash_config``, beside ``num_anchors``; -1 is the embeddings.
  Its ``embed_tokens`` is a frozen copy of the base's, which is used instead. Layers may be those of
  Gemma 4, which scale embeddings and cap logits.
* Transformers' ``muse_glimmer_assistant``: likewise; two tensors have other names, and slots of
  layers with a window see those behind them.

A flag that may change predictions and is not known is an error; in flat configs, which hold fields
of models, those that are on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_spec.adapters.base_model import check_read_layers
from hf_spec.adapters.checkpoint import complaints
from hf_spec.adapters.predicting import VOCABULARY
from hf_spec.drafting.block_diffusion.config import (
    COUNTS,
    SCALES,
    SELECTOR,
    TYPE,
    TYPES,
    BlockConfig,
)
from hf_spec.drafting.block_diffusion.network import modules
from hf_spec.drafting.draft_vocabulary import HEAD
from hf_spec.drafting.layer_types import LAYER_TYPES, LayerType
from hf_spec.drafting.made_once import is_plain
from hf_spec.drafting.transitions import CONFIDENCE
from modeling_patches.weights import output_bias, output_weight

#: Tensors that files may have besides: the base's embeddings, and what is computed.
LEFT_OUT = ("embed_tokens.weight", "rotary_emb.inv_freq", "t2d")
#: The base's tokens of a draft vocabulary, less their index.
OFFSETS = "d2t"
#: Fields that choose what is drafted, in a part of the config of their own.
DRAFTING = "dflash_config"
#: The type that Transformers has as a model of its own, and how its names begin here.
MUSE = "muse_glimmer_assistant"
OF_MUSE = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
#: Drafters of other kinds, by ``speculators_model_type``, ``projector_type`` or architecture.
OTHERS = {"xpress": "a refiner", "domino": "Domino's head"}
#: Flags with the value that changes nothing. Others are refused.
NEUTRAL: dict[str, Any] = {
    "is_causal": False, "use_swa": False, "attention_sink_bias": False, "target_hidden_size": None,
    "attention_mode": "gqa",
}  # fmt: skip
#: Fields of ours that DFlash 2 has, too.
OF_DFLASH_2 = ("selector_top_k", "conv_kernel_size", "conv_group_size")
#: Fields that say how a drafter was trained, or are known otherwise.
KNOWN = {
    "mask_token_id", "target_layer_ids", "block_size", "projector_type", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "confidence_head_alpha", "sample_from_anchor", "sliding_window_non_causal", "num_anchors",
    "loss_decay_gamma", "draft_vocab_size", "aux_hidden_state_layer_ids", "selector_rank",
    *OF_DFLASH_2, *SCALES.values(), *NEUTRAL,
}  # fmt: skip
#: Fields of every config of speculators.
OF_SPECULATORS = {
    "architectures", "auto_map", "dtype", "torch_dtype", "model_type", "speculators_config",
    "speculators_model_type", "speculators_version", "tie_word_embeddings",
    "transformer_layer_config", "transformers_version", "has_no_defaults_at_init",
}  # fmt: skip


def wants(name: str) -> bool:
    """Whether a tensor of this name belongs to the drafter."""
    return not name.endswith(LEFT_OUT)


def kind_of(config: Mapping[str, Any]) -> str | None:
    """``dflash`` or ``dspark``, by a checkpoint's config; None if it is neither.

    Raises:
        ValueError: it is a drafter of a kind like these that is not run.
    """
    part = _drafting(config)
    named = config.get("speculators_model_type") or part.get("projector_type")
    architectures = [str(name) for name in config.get("architectures") or ()]
    for name in (named, *architectures):
        if name in OTHERS:
            raise ValueError(
                f"its config.json is of type {name!r}, with {OTHERS[name]}: such drafters are not "
                "run here"
            )
    if config.get("model_type") == MUSE:
        return "dflash"
    if named is None and any("DSpark" in name for name in architectures):
        return "dspark"
    if named is None and (part or any("DFlash" in name for name in architectures)):
        return "dflash"
    return {"dflash2": "dflash"}.get(str(named), named if named in ("dflash", "dspark") else None)


def fits(kind: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint with this config is a drafter of the kind ``dflash`` or ``dspark``."""
    return kind_of(config) == kind


def convert(
    kind: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of ``BlockConfig`` and the adapter's parameters, from a published checkpoint.

    Args:
        kind: ``dflash`` or ``dspark``.
        config: the content of its ``config.json``.

    Raises:
        ValueError: naming the field or tensor that is missing, unknown, or does not fit.
    """
    if not config:
        raise ValueError("there is no config.json beside it, which says what its tensors mean")
    found = kind_of(config)
    if found != kind:
        other = f"it is of type {found!r}: give --type {found}" if found else (
            "config.json is that of no known layout: it has neither speculators_model_type nor "
            "dflash_config"
        )  # fmt: skip
        raise ValueError(other)
    fields = _fields(config)
    BlockConfig(**fields)  # checks them, before tensors are compared with what they ask for
    weights = {name: tensor for name, tensor in tensors.items() if name != OFFSETS}
    if config.get("model_type") == MUSE:
        for theirs, prefix in OF_MUSE.items():
            weights = {name.replace(theirs, prefix): one for name, one in weights.items()}
    vocab = fields["base_facts"].get("vocab_size", 0)
    if OFFSETS in tensors:
        ids = _tokens(tensors[OFFSETS], vocab)
        given = _value(config, "draft_vocab_size", len(ids))
        if given != len(ids):
            raise ValueError(f"'d2t' has {len(ids)} tokens, draft_vocab_size is {given}")
        weights[VOCABULARY] = ids
        fields |= {"draft_vocab_size": len(ids), "head": "own"}
    elif _value(config, "draft_vocab_size", None) not in (None, vocab):
        raise ValueError("tensor 'd2t' is missing, which draft_vocab_size asks for")
    elif HEAD in weights:
        fields["head"] = "own"
    if fields.get("confidence_head"):
        weights.setdefault(CONFIDENCE[1], torch.zeros(1))  # DeepSpec's has none
    made = BlockConfig(**fields)
    with torch.device("meta"):
        expected = nn.ModuleDict(modules(made, vocab)).state_dict() | made.fresh_vocabulary()
    wrong = complaints(weights, expected)
    if wrong:
        raise ValueError("; ".join(wrong))
    return fields, weights


def share(model: Any, config: Any, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The config and the parameters, without output embeddings that are those of the base.

    Raises:
        ValueError: it reads the base's last layer.
    """
    check_read_layers(model, config.feature_layers)
    own, theirs = weights.get(HEAD), output_weight(model)
    if own is None or theirs is None or theirs.is_meta or not is_plain(theirs):
        return config, weights
    if output_bias(model) is not None:
        return config, weights
    rows = theirs if VOCABULARY not in weights else theirs[weights[VOCABULARY].to(theirs.device)]
    if rows.shape != own.shape or not torch.equal(own.to(rows), rows):
        return config, weights
    kept = {name: tensor for name, tensor in weights.items() if name != HEAD}
    return replace(config, head="base"), kept


def _drafting(config: Mapping[str, Any]) -> Mapping[str, Any]:
    part = config.get(DRAFTING) or {}
    if not isinstance(part, Mapping):
        raise ValueError(f"{DRAFTING} in config.json is {part!r}, not a group of fields")
    return part


def _value(config: Mapping[str, Any], name: str, *default: Any) -> Any:
    """A field, wherever it stands."""
    for part in (_drafting(config), config):
        if name in part:
            return part[name]
    if default:
        return default[0]
    raise ValueError(f"config.json has no {name}")


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    ours = "speculators_model_type" in config
    known = KNOWN | OF_SPECULATORS if ours else KNOWN
    layers = config.get("transformer_layer_config") if ours else config
    if not isinstance(layers, Mapping):
        raise ValueError("config.json has no transformer_layer_config")
    kind = _layer_type(layers, ours or bool(_drafting(config)))
    flags = config if ours else _drafting(config) or _switches(config, kind)
    for name in flags:
        if name not in known and not name.startswith("_"):
            raise ValueError(f"config.json has the field {name!r}, whose meaning is not known here")
    for name, neutral in NEUTRAL.items():
        value = _value(config, name, neutral)
        if value not in (neutral, None):
            raise ValueError(f"config.json has {name}={value!r}, which is not run here")
    count = _count(layers, "num_hidden_layers")
    muse = config.get("model_type") == MUSE
    base = {name: _count(layers, name) for name in ("hidden_size", "vocab_size")[: 2 - muse]}
    if config.get("num_target_layers"):
        base["num_hidden_layers"] = _count(config, "num_target_layers")
    dspark = kind_of(config) == "dspark"
    fields = {
        "block_size": _value(config, "block_size"),
        "mask_token_id": _value(config, "mask_token_id"),
        "sample_from_anchor": _value(config, "sample_from_anchor", dspark),
        "num_layers": count,
        "feature_layers": _features(config, count),
        "layer_config": _layer_config(layers, kind),
        "embedding_scale": kind.embedding_scale(base["hidden_size"]),
        "base_facts": base,
    }
    fields["markov_rank"] = rank = _value(config, f"{'markov' if dspark else 'selector'}_rank", 0)
    if rank:
        head = _value(config, "markov_head_type", "vanilla") if dspark else SELECTOR
        fields["markov_head"] = head
    theirs_of = SCALES if dspark else SCALES | dict(zip(OF_DFLASH_2, OF_DFLASH_2))
    for name, theirs in theirs_of.items():
        if (value := _value(config, theirs, None)) is not None:
            fields[name] = value
    if dspark and _value(config, "enable_confidence_head", False):
        seen = _value(config, "confidence_head_with_markov", True)
        fields["confidence_head"] = "markov" if seen else "state"
    kinds = layers.get("layer_types") or []
    sliding = [place for place, one in enumerate(kinds) if one == "sliding_attention"]
    if sliding:
        fields |= {
            "sliding_layers": sliding,
            "sliding_window": _count(layers, "sliding_window"),
            "sliding_window_from": "anchor" if ours else "query",
            # z-lab: causal, unless it says that it is not.
            "sliding_window_non_causal": config.get("sliding_window_non_causal", False)
            if ours else muse or config.get("is_causal") is not None,
        }  # fmt: skip
    return fields


def _features(config: Mapping[str, Any], layers: int) -> list[int]:
    """The base's layers that are read, as ``output_hidden_states`` numbers them."""
    ids = config.get("aux_hidden_state_layer_ids")
    first = 0
    if "speculators_model_type" not in config:
        ids, first = _value(config, "target_layer_ids", None), 1
        if ids is None:
            of_base = _count(config, "num_target_layers")
            end = of_base - 3
            steps = [1 + (end - 1) * place / max(layers - 1, 1) for place in range(layers)]
            ids = [of_base // 2] if layers == 1 else [round(step) for step in steps]
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise ValueError(f"config.json has no list of the base's layers that are read, but {ids!r}")
    return [one + first for one in ids]


def _layer_type(layers: Mapping[str, Any], foreign: bool) -> LayerType:
    """The type of a checkpoint's layers; ``foreign`` layouts are those whose layers are Qwen3's."""
    kind = LAYER_TYPES.get(str(layers.get(TYPE)))
    if kind is None or kind.name not in TYPES:
        return LAYER_TYPES[TYPES[0]]  # named after the base; names of tensors tell
    if foreign and kind.name != TYPES[0]:
        raise ValueError(
            f"config.json has {TYPE}={layers[TYPE]!r}: such layers are read in DeepSpec's layout, "
            f"in others those of {TYPES[0]}"
        )
    return kind


def _switches(config: Mapping[str, Any], kind: LayerType) -> set[str]:
    """Fields of a flat config that are on, and none of the model that the layers are of."""
    return {name for name, value in config.items() if value is True} - {
        *kind.config_class()().to_dict()
    }


def _layer_config(layers: Mapping[str, Any], kind: LayerType) -> dict[str, Any]:
    layers = kind.flat(layers)
    heads, hidden = _count(layers, "num_attention_heads"), _count(layers, "hidden_size")
    return {
        **{name: layers.get(name) for name in COUNTS},
        "num_key_value_heads": layers.get("num_key_value_heads", heads),
        "head_dim": layers.get("head_dim") or hidden // heads,
        "hidden_act": layers.get("hidden_act", "silu"),
        "rms_norm_eps": layers.get("rms_norm_eps", 1e-6),
        "attention_bias": layers.get("attention_bias", False),
        "rope_parameters": layers["rope_parameters"],
        **({TYPE: kind.name} if kind.name != TYPES[0] else {}),
        **{name: layers[name] for name in kind.own},
    }


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json has {name}={value!r}, which must be a whole number")
    return value


def _tokens(offsets: Tensor, vocab: int) -> Tensor:
    """``(size,)`` ids of a draft vocabulary."""
    if offsets.ndim != 1 or offsets.is_floating_point() or not len(offsets):
        raise ValueError(
            f"'d2t' is {offsets.dtype} of shape {tuple(offsets.shape)}, not a list of whole numbers"
        )
    ids = offsets.long() + torch.arange(len(offsets), device=offsets.device)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or bool((ids.diff() < 1).any()):
        raise ValueError(
            f"'d2t' names tokens {int(ids.min())} to {int(ids.max())}: they must ascend, and stay "
            f"below vocab_size, {vocab}"
        )
    return ids
