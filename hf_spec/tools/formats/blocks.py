"""Released block drafters: DFlash, DFlash 2 and DSpark.

Formats name most tensors as :class:`BlockAdapter` does; by their ``config.json`` they are:

* speculators': ``speculators_model_type``, with the layers described by a part of it.
* z-lab's and SpecForge's: the config of Qwen3 layers with ``dflash_config``. ``target_layer_ids``
  number layers by their *outputs*, one less; without them, they are evenly spaced.
* DeepSpec's: the same fields without ``dflash_config``, beside ``num_anchors``; -1 is the
  embeddings, of which it has a frozen copy. Layers may be those of Gemma 4.
* Transformers' ``muse_glimmer_assistant``: likewise; two tensors have other names, and slots of
  layers with a window see those behind them.

A field that is not known is an error; in flat configs, which hold fields of models, one that is on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.module import Adapter
from hf_spec.adapters.predicting import VOCABULARY, vocab_size
from hf_spec.core.checks import check_count
from hf_spec.core.limits import MAX_SIZE
from hf_spec.drafting.block_diffusion.dspark import CONFIDENCE
from hf_spec.drafting.draft_vocabulary import HEAD, DraftVocabulary
from hf_spec.tools.formats import tables
from hf_spec.tools.formats.tables import ANY, KIND, LAYERS, OF_DEEPSPEC, Files, Reader
from modeling_patches.modules import num_layers
from modeling_patches.weights import output_bias

SELECTOR = "selector"
#: Types of layers that formats have; the first one where a config names another.
TYPES = ("qwen3", "gemma4_text")
#: Fields that choose what is drafted, in a part of the config of their own.
GROUP = "dflash_config"
#: The type that Transformers has as a model of its own, and prefixes of its names.
MUSE = "muse_glimmer_assistant"
NAMES = (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))
#: Ends of tensors that files may have besides: the base's embeddings, and what is computed.
UNUSED = ("embed_tokens.weight", "rotary_emb.inv_freq", tables.MASK)
#: Drafters of other kinds, by ``speculators_model_type``, ``projector_type`` or architecture.
OTHERS = {"xpress": "a refiner", "domino": "Domino's head"}
#: Our fields and theirs: those of all, of DFlash 2 and of DSpark.
FIELDS = {name: name for name in ("block_size", "mask_token_id", "sample_from_anchor")}
SCALES = {
    "embedding_scale": "input_embedding_scale", "logit_scale": "output_multiplier",
    "logit_softcap": "final_logit_softcapping",
}  # fmt: skip
SIZE = {"draft_vocab_size": "draft_vocab_size"}
OF_DFLASH_2 = {
    "markov_rank": "selector_rank",
    **{name: name for name in ("selector_top_k", "conv_kernel_size", "conv_group_size")},
}
OF_DSPARK = {"markov_rank": "markov_rank", "markov_head": "markov_head_type"}
CONFIDENCE_HEAD = ("enable_confidence_head", "confidence_head_with_markov")
IDS, CAUSAL = "aux_hidden_state_layer_ids", "sliding_window_non_causal"
#: Fields with the value that changes nothing.
NEUTRAL: dict[str, Any] = {
    "is_causal": False, "use_swa": False, "attention_sink_bias": False, "target_hidden_size": None,
    "attention_mode": "gqa",
}  # fmt: skip
#: Fields that are read, or say how a drafter was trained.
KNOWN = NEUTRAL | dict.fromkeys(
    (
        *FIELDS.values(), *OF_DFLASH_2.values(), *OF_DSPARK.values(), *SCALES.values(),
        *CONFIDENCE_HEAD, IDS, CAUSAL, OF_DEEPSPEC, *SIZE, "projector_type",
        "confidence_head_alpha", "num_anchors", "loss_decay_gamma",
    ),
    ANY,
)  # fmt: skip
#: Fields of every config of speculators.
OF_SPECULATORS = dict.fromkeys(
    (
        "architectures", "auto_map", "dtype", "torch_dtype", "model_type", "speculators_config",
        KIND, "speculators_version", "tie_word_embeddings", LAYERS, "transformers_version",
        "has_no_defaults_at_init",
    ),
    ANY,
)  # fmt: skip


def kind_of(config: Mapping[str, Any]) -> str | None:
    """``dflash`` or ``dspark``, by a checkpoint's config; None if it is neither.

    Raises:
        ValueError: it is a drafter of a kind like these that is not run.
    """
    part = tables.group(config, GROUP)
    named = config.get(KIND) or part.get("projector_type")
    architectures = [str(name) for name in config.get("architectures") or ()]
    for name in (named, *architectures):
        if name in OTHERS:
            raise ValueError(
                f"its config.json is of type {name!r}, with {OTHERS[name]}: such drafters are not "
                "run here"
            )
    if config.get("model_type") == MUSE:
        return "dflash"
    if named is not None:
        return {"dflash2": "dflash", "dflash": "dflash", "dspark": "dspark"}.get(str(named))
    if any("DSpark" in name for name in architectures):
        return "dspark"
    return "dflash" if part or any("DFlash" in name for name in architectures) else None


def recognizes(kind: str, config: Mapping[str, Any], _: Collection[str]) -> bool:
    return kind_of(config) == kind


def convert(kind: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Files:
    """Fields of ``BlockConfig`` and the adapter's parameters, from a released checkpoint.

    Args:
        kind: ``dflash`` or ``dspark``.

    Raises:
        ValueError: naming the field or tensor that is missing, unknown, or does not fit.
    """
    layers, found = tables.described(config), kind_of(config)
    if found is None:
        raise ValueError(
            f"config.json is that of no known layout: it has neither {KIND} nor {GROUP}"
        )
    if found != kind:
        raise ValueError(f"it is of type {found!r}: give --type {found}")
    fields, weights = _fields(kind, config, layers), tables.renamed(tensors, NAMES)
    known, stated = fields["base_facts"].get("vocab_size", 0), fields.get("draft_vocab_size")
    drafted = fields["draft_vocab_size"] = tables.take_vocabulary(weights, known, stated)
    fields["head"] = "own" if drafted or HEAD in weights else "base"
    if fields.get("confidence_head"):
        weights.setdefault(CONFIDENCE[1], torch.zeros(1))  # DeepSpec's has none
    return fields, weights


def _fields(kind: str, config: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    ours, part = KIND in config, tables.group(config, GROUP)
    type_ = tables.layer_type(layers, TYPES, TYPES[0], not (ours or part))
    flags = config if ours else part
    if not flags:  # fields that are on, and none of the model that the layers are of
        of_model = type_.config_class()().to_dict()
        flags = {n: one for n, one in config.items() if one is True and n not in of_model}
    tables.check_known(flags, KNOWN | OF_SPECULATORS if ours else KNOWN)
    tables.check_known({name: config[name] for name in NEUTRAL if name in config}, NEUTRAL)

    muse, dspark = config.get("model_type") == MUSE, kind == "dspark"
    count = layers.get("num_hidden_layers")
    check_count("num_hidden_layers in config.json", count, high=MAX_SIZE)
    facts: dict[str, Any] = {
        name: layers.get(name) for name in ("hidden_size", "vocab_size")[: 2 - muse]
    }
    if config.get("num_target_layers"):
        facts["num_hidden_layers"] = config["num_target_layers"]
    for name, value in facts.items():
        check_count(f"{name} in config.json", value, high=MAX_SIZE)
    table = FIELDS | SCALES | SIZE | (OF_DSPARK if dspark else OF_DFLASH_2)
    fields: dict[str, Any] = {
        "sample_from_anchor": dspark,
        "markov_rank": 0,
        **tables.layer_fields(layers, type_),
        "attention_bias": layers.get("attention_bias", False),
        "base_facts": facts,
        **tables.fields_of(config, table, (GROUP, "")),
    }
    for name in ("block_size", "mask_token_id"):
        if name not in fields:
            raise ValueError(f"config.json has no {name}")
    if fields["markov_rank"] and not dspark:
        fields["markov_head"] = SELECTOR
    rest = tables.fields_of(config, {x: x for x in (*CONFIDENCE_HEAD, OF_DEEPSPEC)}, (GROUP, ""))
    if dspark and rest.get(CONFIDENCE_HEAD[0]):
        fields["confidence_head"] = "markov" if rest.get(CONFIDENCE_HEAD[1], True) else "state"
    if ours:
        fields["layers"] = tables.numbered(config.get(IDS), 0)
    else:
        spaced = _spaced(facts.get("num_hidden_layers"), count)
        fields["layers"] = tables.numbered(rest.get(OF_DEEPSPEC, spaced), 1)
    kinds = enumerate(layers.get("layer_types") or [])
    if sliding := [place for place, one in kinds if one == "sliding_attention"]:
        # z-lab's are causal, unless they say that they are not.
        both = muse or config.get("is_causal") is not None
        both = config.get(CAUSAL, False) if ours else both
        fields |= {
            "sliding_layers": sliding, "sliding_window": layers.get("sliding_window"),
            "sliding_window_from": "anchor" if ours else "query", CAUSAL: both,
        }  # fmt: skip
    return fields


def _spaced(base: int | None, count: Any) -> list[int] | None:
    """The layers of a base that so many layers read, by their outputs, where none are named."""
    if base is None or count == 1:
        return None if base is None else [base // 2]
    return [round(1 + (base - 4) * place / (count - 1)) for place in range(count)]


def speculators(model: Any, adapter: Adapter) -> dict[str, Any]:
    """``config.json`` and tensors as speculators writes them.

    Raises:
        ValueError: the adapter has what speculators does not know.
    """
    config: Any = adapter.config
    tensors, known = dict(adapter.tensors()), vocab_size(model)
    rank, sliding = config.markov_rank, config.sliding_layers or []
    convolves = bool(config.conv_kernel_size)
    scales = {theirs: getattr(config, name) for name, theirs in SCALES.items()}
    scales = {name: one for name, one in scales.items() if one not in (1.0, None)}
    vocabulary = DraftVocabulary.of(tensors, model) if VOCABULARY in tensors else None
    tables.refuse({
        f"its layers are those of {config.architecture}: speculators knows block drafters with "
        f"layers of {TYPES[0]} only.": config.architecture != TYPES[0],
        f"sliding_window_from={config.sliding_window_from!r}: speculators counts windows from the "
        "anchor, so that drafts would differ.": sliding and config.sliding_window_from != "anchor",
        f"layers={config.layers}: the last is the final state, which others give "
        "before the final norm. Train without it.":
        max(config.layers) == num_layers(model),
        f"draft_vocab_size={config.draft_vocab_size}: {type(model).__name__} has a bias of its "
        "output embeddings, which speculators does not know. Train with --draft-vocab-size 0.":
        vocabulary and not vocabulary.is_own and output_bias(model) is not None,
        f"conv_kernel_size={config.conv_kernel_size} with markov_head={config.markov_head!r}, "
        f"markov_rank={rank}: speculators knows convolutions and a selector only together.":
        convolves != (config.markov_head == SELECTOR and bool(rank)),
        f"{scales}: speculators knows such scales only of drafters with convolutions and a "
        "selector.": scales and not convolves,
    })  # fmt: skip
    if vocabulary is not None:
        tensors[HEAD] = vocabulary.weight
        tables.put_vocabulary(tensors, known)
    kinds = ["sliding_attention" if layer in sliding else "full_attention"
             for layer in range(config.num_layers)]  # fmt: skip
    layers = {
        **tables.written_layers(config, known),
        "layer_types": kinds, "sliding_window": config.sliding_window,
        "use_sliding_window": bool(sliding), "attention_dropout": 0.0,
    }  # fmt: skip
    kind, name, table = "dflash", "DFlash", {}
    if convolves:
        kind, name, table = "dflash2", "DFlash2", OF_DFLASH_2
    elif rank:
        kind, name, table = "dspark", "DSpark", OF_DSPARK
    written = tables.speculators_config(
        model, config, kind, f"{name}DraftModel", config.distances, layers
    )
    written |= {theirs: getattr(config, ours) for ours, theirs in (FIELDS | table).items()} | scales
    written |= {
        IDS: config.layers,
        # Without windows it has no effect in speculators; if False, vLLM runs all layers causally.
        CAUSAL: config.sliding_window_non_causal or not sliding,
        "draft_vocab_size": config.draft_vocab_size or known,
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
    }
    if kind == "dspark":
        head = config.confidence_head
        written |= dict(zip(CONFIDENCE_HEAD, (head != "none", head == "markov")))
    return {tables.CONFIG: written, tables.WEIGHTS: tensors}


READERS = {
    kind: Reader(
        lambda name: not name.endswith(UNUSED), partial(convert, kind),
        partial(recognizes, kind),
        partial(tables.without_copy, name=HEAD, head="base"),
    )
    for kind in ("dflash", "dspark")
}  # fmt: skip
WRITERS = {"speculators": speculators}
