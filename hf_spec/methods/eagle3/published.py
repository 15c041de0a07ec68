"""Published EAGLE-3 checkpoints as adapters.

Layouts, by their config: that of speculators (RedHatAI), whose decoder is described under
``transformer_layer_config``, and flat ones, which are a Llama's config (SafeAILab, AngelSlim), with
``eagle_config`` in those of SpecForge and ModelOpt, or the base's with ``target_layer_ids``
(DeepSpec), whose layers may be those of Gemma 4. Layers are counted as in ``output_hidden_states``
by speculators, and one lower under ``eagle_config`` and by DeepSpec. ``d2t`` holds what is added to
a draft token's index to get its id.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.base_model import check_read_layers
from hf_spec.adapters.predicting import VOCABULARY
from hf_spec.core.checks import check_count
from hf_spec.core.limits import MAX_SIZE
from hf_spec.drafting.layer_types import LAYER_TYPES, LayerType
from hf_spec.methods.eagle3.adapter import ARCHITECTURES, FLAGS, SIZES, Eagle3Config
from hf_spec.methods.registry import Published
from modeling_patches.weights import is_updated

FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)  # fmt: skip
#: Kinds of speculators, the second one drafting all tokens in one forward.
EAGLE3, PARALLEL = KINDS = "eagle3", "peagle"
#: Field of most configs that names the layers, and DeepSpec's.
LAYER_IDS, OF_DEEPSPEC = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
#: Types of layers that all layouts have; DeepSpec's has others, too.
USUAL = ("llama", "qwen3")
#: Old names of tensors, and today's.
RENAMED = {
    "midlayer": "layers.0", "aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}  # fmt: skip
_OLD = re.compile(rf"(?:model\.)?({'|'.join(RENAMED)})\.")
#: What belongs to training, or follows from the config.
_UNUSED = re.compile(r"(.+\.)?rotary_emb\..+|verifier_.+")
#: Values of ``eagle_config`` with which the decoder is EAGLE-3's; None: any.
REQUIRED: dict[str, Any] = {
    LAYER_IDS: None, "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
    "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None, "has_lm_head": None,
    "head_dim": None, "eagle_decoder_type": None, "draft_vocab_size": None,
    **dict.fromkeys(FLAGS),
}  # fmt: skip
#: Switches of a config that are on and change nothing here.
HARMLESS = {"embed_requires_grad", "return_dict", "tie_word_embeddings", "use_cache", *FLAGS}
#: Output rows of ``fc`` that AngelSlim's early stopping adds at most.
EARLY_STOP = 3


def wants(name: str) -> bool:
    return _UNUSED.fullmatch(name) is None


def recognizes(config: Mapping[str, Any], names: Collection[str]) -> bool:
    return {"fc.weight", "layers.0.hidden_norm.weight"} <= set(map(_today, names))


def _today(name: str) -> str:
    name = _OLD.sub(lambda match: f"{RENAMED[match[1]]}.", name)
    return name.removeprefix("model.")


def convert(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of ``Eagle3Config`` and the adapter's parameters, from a published checkpoint.

    Raises:
        ValueError: a field is missing, unknown or not supported, or tensors do not fit the config.
    """
    if not config:
        raise ValueError(
            "there is no config.json beside it, which says what its numbers mean: take it from "
            "where the weights come from"
        )
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _today(name) in found:
            raise ValueError(f"{name!r} is there twice, under different names")
        found[_today(name)] = tensor
    fields = _fields(config, found)
    hidden = fields["hidden_size"]
    fusing = found.get("fc.weight")
    if fusing is not None and fusing.ndim == 2 and 0 < len(fusing) - hidden <= EARLY_STOP:
        found["fc.weight"] = fusing[:hidden]
    fields["draft_vocab_size"] = _put_vocabulary(config, fields.pop("vocab_size"), found)
    fields["own_embeddings"] = "embed_tokens.weight" in found
    fields["embedding_scale"] = LAYER_TYPES[fields["architecture"]].embedding_scale(hidden)
    return fields, found


def _fields(config: Mapping[str, Any], found: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of ``Eagle3Config``, and ``vocab_size``."""
    kind = config.get("speculators_model_type")
    if kind not in (None, *KINDS):
        read = " and ".join(map(repr, KINDS))
        raise ValueError(f"speculators_model_type={kind!r} in config.json: {read} are read")
    inner: Any = config.get("transformer_layer_config") if kind else config
    if not isinstance(inner, Mapping):
        raise ValueError("config.json has no transformer_layer_config, which describes its layers")
    layer_type = LAYER_TYPES.get(str(inner.get("model_type")))
    if layer_type is None:
        raise ValueError(
            f"model_type={inner.get('model_type')!r} in config.json: decoder layers of "
            f"{', '.join(ARCHITECTURES)} are read"
        )
    if layer_type.name not in USUAL and OF_DEEPSPEC not in config:
        raise ValueError(
            f"model_type={inner['model_type']!r} in config.json: such layers are read with "
            f"{OF_DEEPSPEC}, as DeepSpec writes them"
        )
    inner = layer_type.flat(inner)
    _check_flags(config, layer_type)
    for name in ("attention_bias", "mlp_bias"):
        if inner.get(name):
            raise ValueError(f"{name}={inner[name]!r} in config.json: layers without are read")
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        check_count(f"{name} in config.json", inner.get(name), high=MAX_SIZE)
    eagle = _eagle_config(config)
    fields = {name: inner.get(name) for name in (*SIZES, "vocab_size")}
    fields |= {"architecture": layer_type.name, **{name: inner[name] for name in layer_type.own}}
    if OF_DEEPSPEC in config:
        fields["logit_softcap"] = inner.get("final_logit_softcapping")
    fields["num_key_value_heads"] = fields["num_key_value_heads"] or inner["num_attention_heads"]
    if fields["head_dim"] is None:
        fields["head_dim"] = inner["hidden_size"] // inner["num_attention_heads"]
    fields["num_layers"] = inner.get("num_hidden_layers", 1)
    fields["hidden_act"] = inner.get("hidden_act", "silu")
    fields["rms_norm_eps"] = inner.get("rms_norm_eps", 1e-6)
    fields["rope_parameters"] = inner["rope_parameters"]
    by_tensors = {
        "norm_before_fc": "input_norm.weight" in found, "fc_norm": "fc_norm.0.weight" in found
    }  # fmt: skip
    for name in FLAGS:
        given = (config.get(name), eagle.get(name), by_tensors.get(name, False))
        fields[name] = next(value for value in given if value is not None)
    if kind == PARALLEL:
        check_count("mask_token_id in config.json", config.get("mask_token_id"), low=0)
        fields["mask_token_id"] = config["mask_token_id"]
    layers, lower = config.get(LAYER_IDS), eagle.get(LAYER_IDS) or config.get(OF_DEEPSPEC)
    if layers:
        fields["layers"] = layers
    elif lower:
        whole = isinstance(lower, list) and all(type(one) is int for one in lower)
        fields["layers"] = [one + 1 for one in lower] if whole else lower
    return fields


def _eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    eagle = config.get("eagle_config") or {}
    if not isinstance(eagle, Mapping):
        raise ValueError(f"eagle_config={eagle!r} in config.json: it must be an object")
    return eagle


def _check_flags(config: Mapping[str, Any], kind: LayerType) -> None:
    """Raise a ValueError if a switch is on that is not known."""
    for name, value in _eagle_config(config).items():
        wanted = REQUIRED.get(name)
        if name in REQUIRED and (wanted is None or value == wanted):
            continue
        if name in REQUIRED or value:
            rule = f"{wanted!r} is read" if name in REQUIRED else "it is not known"
            raise ValueError(f"eagle_config.{name}={value!r} in config.json: {rule}")
    inner = config.get("transformer_layer_config") or {}
    for name, value in (*config.items(), *inner.items()):
        if value is True and name not in HARMLESS and name not in kind.own:
            raise ValueError(f"{name}={value!r} in config.json: it is not known")


def _put_vocabulary(config: Mapping[str, Any], known: int, found: dict[str, Tensor]) -> int:
    """Replace ``d2t`` and ``t2d`` by the ids of draft tokens; returns their number, 0 for all."""
    head, shift = found.get("lm_head.weight"), found.pop("d2t", None)
    marks = found.pop("t2d", None)
    if head is None:
        raise ValueError("it has no tensor 'lm_head.weight', which draft tokens are chosen with")
    if head.ndim != 2 or not len(head):
        raise ValueError(
            f"'lm_head.weight' has shape {tuple(head.shape)}, expected (tokens, hidden_size)"
        )
    size = len(head)
    stated = config.get("draft_vocab_size") or size
    if stated != size:
        raise ValueError(
            f"'lm_head.weight' has {size} rows, but draft_vocab_size={stated!r} in config.json"
        )
    if shift is None and size == known:
        return 0
    if shift is None:
        if marks is None or marks.dtype != torch.bool:
            raise ValueError(
                f"'lm_head.weight' has {size} rows for {known} tokens, and there is no tensor "
                "'d2t' that says which"
            )
        ids = marks.nonzero()[:, 0]
    elif shift.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"'d2t' is of type {shift.dtype}: offsets are whole numbers")
    else:
        ids = shift.long().flatten() + torch.arange(shift.numel(), device=shift.device)
    if len(ids) != size:
        raise ValueError(f"'d2t' or 't2d' names {len(ids)} tokens, 'lm_head.weight' has {size}")
    ids, order = ids.sort()
    if int(ids[0]) < 0 or int(ids[-1]) >= known or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(
            f"'d2t' leads to ids {int(ids[0])} to {int(ids[-1])}: it must lead to {size} different "
            f"ones of the vocabulary, 0 to {known - 1}"
        )
    if size == known:
        found["lm_head.weight"] = head[order]
        return 0
    found["lm_head.weight"], found[VOCABULARY] = head[order], ids
    return size


def share(
    model: Any, config: Eagle3Config, tensors: dict[str, Tensor]
) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """The same without embeddings that are the base's.

    Raises:
        ValueError: it reads the base's last layer.
    """
    check_read_layers(model, config.layers or ())
    own, embeddings = tensors.get("embed_tokens.weight"), model.get_input_embeddings()
    weight = getattr(embeddings, "weight", None)
    same = (
        own is not None
        and weight is not None
        and not weight.is_meta
        and not is_updated(embeddings)
        and own.shape == weight.shape
        and torch.equal(own.to(weight.dtype), weight.detach().cpu())
    )
    if not same:
        return config, tensors
    rest = {name: one for name, one in tensors.items() if name != "embed_tokens.weight"}
    return dataclasses.replace(config, own_embeddings=False), rest


PUBLISHED = Published(wants, convert, FILES, recognizes, share)
