"""Checkpoints of block drafters, read and written: DFlash (also 2), JetSpec, DSpark, Domino,
DSpine, xPress and LiLiCorr.

Formats name most tensors as :class:`BlockAdapter` does; by their ``config.json`` they are:

* speculators': ``speculators_model_type``, with the layers described by a part of it.
* z-lab's and SpecForge's, which SGLang reads: the config of Qwen3 layers with ``dflash_config``.
  ``target_layer_ids`` number layers by their *outputs*, one less; without them, they are evenly
  spaced.
* DeepSpec's: the same fields without ``dflash_config``, beside ``num_anchors``; -1 is the
  embeddings, of which it has a frozen copy. Layers may be those of Gemma 4.
* Transformers' ``muse_glimmer_assistant``: likewise; two tensors have other names, and slots of
  layers with a window see those behind them.

A field that is not known is an error; in flat configs, which hold fields of models, one that is
on.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_spec.adapters.config import VOCABULARY, vocab_size
from hf_spec.adapters.layer import Adapter
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.weights import output_bias
from hf_spec.predict.block_heads import CONFIDENCE
from hf_spec.predict.markov import HEAD, DraftVocabulary
from hf_spec.tools.formats import tables
from hf_spec.tools.formats.tables import ANY, KIND, LAYERS, OF_DEEPSPEC, Files, Reader

#: Types of layers that formats have; the first one where a config names another.
TYPES = ("qwen3", "gemma4_text")
#: Fields that choose what is drafted, in a part of the config of their own.
GROUP = "dflash_config"
#: The type that Transformers has as a model of its own, and prefixes of its names; of Domino's in
#: early files; of the heads of ModelOpt's DSpark.
MUSE = "muse_glimmer_assistant"
NAMES = (
    ("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."), ("logit_head.", ""),
    *((name, f"markov_head.{name}")
      for name in ("markov_w1.", "markov_w2.", "gate_proj.", "joint_proj.")),
    ("confidence_proj.", "confidence_head.proj."),
)  # fmt: skip
#: Ends of tensors that files may have besides: the base's embeddings, and what is computed.
UNUSED = ("embed_tokens.weight", "rotary_emb.inv_freq", tables.MASK)
#: Of DSpine: whether its codes have been made.
READY = "transfer_ready"
#: Our fields and theirs: those of all, of DFlash 2 and of DSpark.
FIELDS = {name: name for name in ("block_size", "mask_token_id", "sample_from_anchor")}
SCALES = {
    "embedding_scale": "input_embedding_scale", "logit_scale": "output_multiplier",
    "logit_softcap": "final_logit_softcapping",
}  # fmt: skip
CONFIDENCE_HEAD = ("enable_confidence_head", "confidence_head_with_markov")
#: Of ModelOpt's DSpark: whether it has that head, with a Markov head, and our `sample_from_anchor`.
HAS_CONFIDENCE, SHIFTS = "use_confidence_head", "shift_label"
#: Of convolutions; of LiLiCorr, whether it has a head, and what SGLang takes of its tokens.
CONVOLUTIONS = {name: name for name in ("conv_kernel_size", "conv_group_size")}
ENABLED, CANDIDATES = "lilicorr_enabled", (1, 2, 4, 8, 16)
#: xPress' rank, and the width of its MLP as a multiple of that.
RANK, RATIO = "xpress_rank", "xpress_mlp_ratio"
IDS, CAUSAL = "aux_hidden_state_layer_ids", "sliding_window_non_causal"


class Kind(NamedTuple):
    """A kind of block drafters.

    Attributes:
        strategy: ours.
        name: in architectures.
        fields: our fields and theirs, besides those of all.
        heads: values of ``markov_head`` that it may have; a field says which one, if several.
        tensors: what names of tensors begin with that it alone has.
        group: of its fields in flat configs.
    """

    strategy: str
    name: str
    fields: Mapping[str, str] = {}
    heads: tuple[str, ...] = ()
    tensors: str = ""
    group: str = GROUP

    @property
    def head(self) -> str | None:
        """Its ``markov_head``; None if there is none, or a field says."""
        return self.heads[0] if len(self.heads) == 1 else None


#: By ``speculators_model_type`` or ``projector_type``.
KINDS = {
    "dflash": Kind("dflash", "DFlash"),
    "dflash2": Kind(
        "dflash", "DFlash2", {
            "markov_rank": "selector_rank", "selector_top_k": "selector_top_k", **CONVOLUTIONS,
        }, ("selector",), "candidate_selector.",
    ),
    "dspark": Kind(
        "dspark", "DSpark", {"markov_rank": "markov_rank", "markov_head": "markov_head_type"},
        ("vanilla", "gated", "rnn"),
    ),
    "domino": Kind(
        "dflash", "Domino", {
            "markov_rank": "emb_dim", "markov_width": "gru_hidden_dim",
            "markov_skips": "pure_draft_prefix_len", "sample_from_anchor": SHIFTS,
        }, ("domino",), "prefix_gru.",
    ),
    "dspine": Kind(
        "dflash", "DSpine", {
            "markov_rank": "transfer_rank", "markov_width": "message_size",
            "selector_top_k": "top_k",
        }, ("dspine",), "injection.", "dspine_config",
    ),
    "xpress": Kind("dflash", "XPress", {"markov_rank": RANK}, ("xpress",), "refiner_head."),
    "lilicorr": Kind(
        "dflash", "LiLiCorr", {
            "markov_rank": "lilicorr_factor_dim", "markov_width": "lilicorr_hidden_size",
            "selector_top_k": "lilicorr_candidate_topk", "lattice_layers": "lilicorr_num_layers",
            "lattice_heads": "lilicorr_num_heads", "lattice_mlp_ratio": "lilicorr_mlp_ratio",
            "lattice_scale": "lilicorr_logit_scale", "lattice_eps": "lilicorr_vector_eps",
            **CONVOLUTIONS,
        }, ("lilicorr",), "lilicorr.",
    ),
}  # fmt: skip
#: Names of the flag of causal blocks: JetSpec's, NeMo's and vLLM's, SpecForge's. vLLM 0.32 reads
#: the last one first, and not the first one; in files of speculators it reads `CAUSAL` alone.
CAUSAL_BLOCK = ("causal_head", "causal", "is_causal")
#: Fields with the value that changes nothing.
NEUTRAL: dict[str, Any] = {
    "use_swa": False, "attention_sink_bias": False, "target_hidden_size": None,
    "attention_mode": "gqa", ENABLED: True,
}  # fmt: skip
#: Fields that are read, or say how a drafter was trained.
KNOWN = NEUTRAL | dict.fromkeys(
    (
        *FIELDS.values(), *(name for kind in KINDS.values() for name in kind.fields.values()),
        *SCALES.values(), *CONFIDENCE_HEAD, HAS_CONFIDENCE, *CAUSAL_BLOCK, IDS, CAUSAL,
        OF_DEEPSPEC, RATIO,
        "draft_vocab_size", "num_jacobi_passes", "projector_type", "confidence_head_alpha",
        "num_anchors", "loss_decay_gamma", "ce_weight", "alignment_weight",
        "alignment_warmup_steps", "replacement_layers", "replacement_probability",
        "replacement_hold_ratio", "replacement_end_ratio", "candidate_mass_threshold",
    ),
    ANY,
)  # fmt: skip
#: Fields of every config of speculators.
OF_SPECULATORS = dict.fromkeys(
    (
        "architectures", "auto_map", "dtype", "torch_dtype", "model_type", "speculators_config",
        KIND, "speculators_version", "tie_word_embeddings", LAYERS, "transformers_version",
        "has_no_defaults_at_init", GROUP,
    ),
    ANY,
)  # fmt: skip


# -- Writing ---------------------------------------------------------------------------------------


def _kind_to_write(config: Any) -> str:
    """Which of :data:`KINDS` an adapter is; a ValueError if it is none.

    Convolutions are those of DFlash 2, which its selector needs, and LiLiCorr may have."""
    head = config.markov_head if config.markov_rank else None
    if head != "lilicorr" and bool(config.conv_kernel_size) != (head == "selector"):
        raise ValueError(
            f"conv_kernel_size={config.conv_kernel_size} with "
            f"markov_head={config.markov_head!r}, markov_rank={config.markov_rank}: other programs "
            "know convolutions with a selector or lilicorr only, and no selector without them."
        )
    if head is None:
        return "dflash"
    own = [name for name, kind in KINDS.items() if head in kind.heads]
    if not own:
        known = [head for kind in KINDS.values() for head in kind.heads]
        raise ValueError(
            f"markov_head={head!r}: other programs do not know such drafters. What can be exported "
            f"has one of {', '.join(known)}, or markov_rank=0."
        )
    return own[0]


def _written(
    model: Any, config: Any, name: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Theirs of our fields, scales that are on, and the config of the layers, of a kind; a
    ValueError if no format has this."""
    types = ["sliding_attention" if layer in (config.sliding_layers or []) else "full_attention"
             for layer in range(config.num_layers)]  # fmt: skip
    scales = {theirs: getattr(config, ours) for ours, theirs in SCALES.items()}
    tables.refuse({
        f"its layers are those of {config.architecture}: others know block drafters with "
        f"layers of {TYPES[0]} only.": config.architecture != TYPES[0],
        f"layers={config.layers}: the last is the final state, which others give "
        "before the final norm. Train without it.":
        max(config.layers) == num_layers(model),
        f"confidence_head={config.confidence_head!r}: others know it beside DSpark's Markov heads "
        "only.": config.confidence_head != "none" and name != "dspark",
    })  # fmt: skip
    table = FIELDS | dict(KINDS[name].fields)
    fields = {theirs: getattr(config, ours) for ours, theirs in table.items()}
    if name == "dspark":
        head = config.confidence_head
        fields |= dict(zip(CONFIDENCE_HEAD, (head != "none", head == "markov")))
    layers = {
        **tables.written_layers(config, vocab_size(model)),
        "layer_types": types, "sliding_window": config.sliding_window,
        "use_sliding_window": bool(config.sliding_layers), "attention_dropout": 0.0,
    }  # fmt: skip
    return fields, {one: x for one, x in scales.items() if x not in (1.0, None)}, layers


def speculators(model: Any, adapter: Adapter) -> dict[str, Any]:
    """``config.json`` and tensors as speculators writes them."""
    config: Any = adapter.config
    name, tensors, known = _kind_to_write(config), dict(adapter.tensors()), vocab_size(model)
    fields, scales, layers = _written(model, config, name)
    vocabulary = DraftVocabulary.of(tensors, model) if VOCABULARY in tensors else None
    rank, width = config.markov_rank, config.markov_width
    tables.refuse({
        f"markov_head={config.markov_head!r}: speculators does not know such drafters. Give "
        "--format sglang.": name in ("domino", "dspine", "lilicorr"),
        f"sliding_window_from={config.sliding_window_from!r}: speculators counts windows from the "
        "anchor, so that drafts would differ.":
        config.sliding_layers and config.sliding_window_from != "anchor",
        f"draft_vocab_size={config.draft_vocab_size}: {type(model).__name__} has a bias of its "
        "output embeddings, which speculators does not know. Train with --draft-vocab-size 0.":
        vocabulary and not vocabulary.is_own and output_bias(model) is not None,
        f"{scales}: speculators knows such scales only of drafters with convolutions and a "
        "selector.": scales and name != "dflash2",
        f"markov_width={width}: speculators knows multiples of markov_rank={rank}.":
        name == "xpress" and width % max(rank, 1),
    })  # fmt: skip
    if vocabulary is not None:
        tensors[HEAD] = vocabulary.weight
        tables.put_vocabulary(tensors, known)
    architecture = f"{KINDS[name].name}DraftModel"
    written = tables.speculators_config(model, config, name, architecture, config.distances, layers)
    written |= fields | scales
    if name == "xpress":
        written |= {RATIO: width // rank, "num_jacobi_passes": config.distances}
    if config.causal:
        *of_group, alone = CAUSAL_BLOCK
        written |= {GROUP: dict.fromkeys(of_group, True), alone: True}
    return {
        tables.CONFIG: {
            **written,
            IDS: config.layers,
            # Without windows it has no effect in speculators; if False, vLLM runs all layers
            # causally.
            CAUSAL: not config.causal
            and (config.sliding_window_non_causal or not config.sliding_layers),
            "draft_vocab_size": config.draft_vocab_size or known,
            "dtype": _dtype(tensors),
        },
        tables.WEIGHTS: tensors,
    }


def specforge(model: Any, adapter: Adapter) -> dict[str, Any]:
    """``config.json`` and tensors as SpecForge writes them, and SGLang reads."""
    config: Any = adapter.config
    name, tensors = _kind_to_write(config), dict(adapter.tensors())
    fields, scales, layers = _written(model, config, name)
    sliding, kind = bool(config.sliding_layers), KINDS[name]
    tables.refuse({
        f"markov_head={config.markov_head!r}: SGLang does not know such drafters. Give --format "
        "speculators.": name == "xpress",
        f"draft_vocab_size={config.draft_vocab_size}: SGLang's block drafters draft all tokens. "
        "Train with --draft-vocab-size 0.": VOCABULARY in tensors,
        f"selector_top_k={config.selector_top_k}: of LiLiCorr SGLang takes one of {CANDIDATES}.":
        name == "lilicorr" and config.selector_top_k not in CANDIDATES,
        f"sliding_window_from={config.sliding_window_from!r}: SGLang counts windows from each "
        "slot, so that drafts would differ.": sliding and config.sliding_window_from != "query",
    })  # fmt: skip
    if name != "domino":  # whose field of another name says so
        del fields["sample_from_anchor"]
        tables.refuse({
            f"sample_from_anchor={config.sample_from_anchor}: of {kind.name} SGLang takes "
            f"{not config.sample_from_anchor} only.":
            config.sample_from_anchor != (name == "dspark"),
        })  # fmt: skip
    own = {field: fields.pop(field) for field in kind.fields.values()}
    if name == "lilicorr":
        own[ENABLED] = True
        if not config.conv_kernel_size:  # vLLM takes both or none
            own = {field: value for field, value in own.items() if field not in CONVOLUTIONS}
    groups = {GROUP: {**fields, **scales, OF_DEEPSPEC: [one - 1 for one in config.layers]}}
    groups[kind.group] = groups.get(kind.group, {}) | own
    if name not in ("dflash", "dflash2", "dspine"):
        groups[GROUP]["projector_type"] = name
    written: dict[str, Any] = {
        **layers, "architectures": [f"{kind.name}DraftModel"], **groups,
        "rope_theta": layers["rope_parameters"].get("rope_theta"),
        "block_size": config.block_size, "num_target_layers": num_layers(model),
        "dtype": _dtype(tensors),
    }  # fmt: skip
    if config.causal:
        *of_group, alone = CAUSAL_BLOCK
        groups[GROUP] |= dict.fromkeys(of_group, True)
        written[alone] = True
    elif sliding and config.sliding_window_non_causal:
        written["is_causal"] = False
    if name == "domino":
        written["emb_dim"] = config.markov_rank
    if name == "dspine":
        tensors[READY] = torch.tensor(True)
    return {tables.CONFIG: written, tables.WEIGHTS: tensors}


def _dtype(tensors: Mapping[str, Tensor]) -> str:
    return str(tensors["fc.weight"].dtype).removeprefix("torch.")


# -- Reading ---------------------------------------------------------------------------------------


def kind_of(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """One of :data:`KINDS`, by a checkpoint's config and, where that says no more than DFlash, the
    names of its tensors; None if it is none of them."""
    part = tables.group(config, GROUP)
    named = config.get(KIND) or part.get("projector_type")
    architectures = " ".join(map(str, config.get("architectures") or ()))
    if named is not None:
        found = named if named in KINDS else None
    else:
        likely = [name for name, kind in KINDS.items() if kind.name in architectures]
        found = "dflash" if part or config.get("model_type") == MUSE else None
        found = likely[-1] if likely else found
    if found == "dflash":
        own = [
            name for name, kind in KINDS.items()
            if kind.tensors and any(one.startswith(kind.tensors) for one in names)
        ]  # fmt: skip
        found = own[0] if own else found
    return found


def recognizes(strategy: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    kind = kind_of(config, {tables.own_name(name, NAMES) for name in names})
    return kind is not None and KINDS[kind].strategy == strategy


def convert(strategy: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Files:
    """Fields of ``BlockConfig`` and the adapter's parameters, from a released checkpoint of
    ``dflash`` or ``dspark``."""
    layers, weights = tables.described(config), tables.renamed(tensors, NAMES)
    kind = kind_of(config, weights)
    if kind is None:
        raise ValueError(
            f"config.json is that of no known layout: it has neither {KIND} nor {GROUP}"
        )
    if KINDS[kind].strategy != strategy:
        raise ValueError(f"it is of type {kind!r}: give --type {KINDS[kind].strategy}")
    if not bool(weights.pop(READY, torch.tensor(True))):
        raise ValueError(f"{READY!r} is false: its codes have not been made, and cannot be now")
    fields = _Said(kind, config, layers).fields()
    weights = tables.renamed(weights, early_names(fields.get("lattice_layers", 0)))
    known, stated = fields["base_facts"].get("vocab_size", 0), fields.get("draft_vocab_size")
    drafted = fields["draft_vocab_size"] = tables.take_vocabulary(weights, known, stated)
    fields["head"] = "own" if drafted or HEAD in weights else "base"
    if fields.get("confidence_head"):
        weights.setdefault(CONFIDENCE[1], torch.zeros(1))  # DeepSpec's has none
    return fields, weights


def early_names(lattice_layers: int) -> list[tuple[str, str]]:
    """Prefixes of names that LiLiCorr's MLPs had in early files, and those that they have now."""
    mlps = [("feature_mlp", "1", "3")]
    mlps += [(f"layers.{index}.mlp", "0", "2") for index in range(lattice_layers)]
    pairs = [("feature_mlp.0.", "feature_norm.")]
    for mlp, up, down in mlps:
        pairs += [(f"{mlp}.{up}.", f"{mlp}.up_proj."), (f"{mlp}.{down}.", f"{mlp}.down_proj.")]
    return [(f"lilicorr.{old}", f"lilicorr.{new}") for old, new in pairs]


class _Said:
    """What ``config.json`` says of a drafter of the kind ``name``.

    Attributes:
        ours: whether it is in speculators' format.
        part, own: the groups of fields of all block drafters, and of this kind, if it has them.
        all: fields wherever they stand.
    """

    def __init__(self, name: str, config: Mapping[str, Any], layers: Mapping[str, Any]):
        self.config, self.layers, self.kind = config, layers, KINDS[name]
        self.dspark, self.muse = name == "dspark", config.get("model_type") == MUSE
        self.ours, self.part = KIND in config, tables.group(config, GROUP)
        self.own = tables.group(config, self.kind.group)
        self.all = tables.merged(self.own, self.part, config)
        deepspec = not (self.ours or self.part)
        self.type = tables.layer_type(layers, TYPES, TYPES[0], deepspec)

    def fields(self) -> dict[str, Any]:
        """Fields of ``BlockConfig``, before the weights are looked at."""
        self._check()
        facts = self._base_facts()
        fields: dict[str, Any] = {
            "sample_from_anchor": self.dspark and self.all.get(SHIFTS, True),
            **tables.layer_fields(self.layers, self.type),
            "attention_bias": self.layers.get("attention_bias", False),
            "base_facts": facts,
            "causal": _causal(self.config, self.part),
            **tables.fields_of(self.all, FIELDS | SCALES | dict(self.kind.fields)),
            "draft_vocab_size": self.all.get("draft_vocab_size"),
        }
        self._head(fields)
        if self.ours:
            fields["layers"] = tables.numbered(self.config.get(IDS), 0)
        else:
            spaced = _spaced(facts.get("num_hidden_layers"), self.layers["num_hidden_layers"])
            fields["layers"] = tables.numbered(self.all.get(OF_DEEPSPEC, spaced), 1)
        return fields | self._windows()

    def _check(self) -> None:
        """Raise a ValueError for a field that is not known, or not supported."""
        flags, known = {**self.part, **self.own}, KNOWN
        if self.ours:
            flags, known = dict(self.config), KNOWN | OF_SPECULATORS
        elif not flags:  # fields that are on, and none of the model that the layers are of
            of_model = self.type.config_class()().to_dict()
            flags = {n: one for n, one in self.config.items() if one is True and n not in of_model}
        tables.check_known(flags, known)
        stated = NEUTRAL.keys() & self.config.keys()
        tables.check_known({name: self.config[name] for name in stated}, NEUTRAL)
        tables.check_size("num_hidden_layers", self.layers.get("num_hidden_layers"))

    def _base_facts(self) -> dict[str, Any]:
        """What is known of the base."""
        names = ("hidden_size",) if self.muse else ("hidden_size", "vocab_size")
        facts: dict[str, Any] = {name: self.layers.get(name) for name in names}
        if self.config.get("num_target_layers"):
            facts["num_hidden_layers"] = self.config["num_target_layers"]
        for fact, value in facts.items():
            tables.check_size(fact, value)
        return facts

    def _head(self, fields: dict[str, Any]) -> None:
        """Complete the fields of heads; a ValueError if one is missing."""
        needed = {name: name for name in ("block_size", "mask_token_id")}
        if self.kind.head not in (None, "selector"):
            needed |= {ours: x for ours, x in self.kind.fields.items() if x not in CONVOLUTIONS}
        for field, theirs in needed.items():
            if field not in fields:
                raise ValueError(f"config.json has no {theirs}")
        if fields.setdefault("markov_rank", 0) and self.kind.head is not None:
            fields["markov_head"] = self.kind.head
        if not fields.get("conv_kernel_size"):  # 0 for both means none
            fields.pop("conv_group_size", None)
        if fields.get("markov_width") == 0:  # LiLiCorr's means that of the drafter
            fields["markov_width"] = self.layers.get("hidden_size")
        if RATIO in self.all:
            tables.check_size(RATIO, self.all[RATIO])
            fields["markov_width"] = self.all[RATIO] * fields["markov_rank"]
        has_confidence, with_markov = CONFIDENCE_HEAD
        if self.dspark and (self.all.get(has_confidence) or self.all.get(HAS_CONFIDENCE)):
            fields["confidence_head"] = "markov" if self.all.get(with_markov, True) else "state"

    def _windows(self) -> dict[str, Any]:
        """Fields of layers with a sliding window; empty if there are none."""
        types = enumerate(self.layers.get("layer_types") or [])
        sliding = [place for place, one in types if one == "sliding_attention"]
        if not sliding:
            return {}
        # z-lab's are causal, unless they say that they are not.
        both = self.muse or self.config.get("is_causal") is not None
        return {
            "sliding_layers": sliding, "sliding_window": self.layers.get("sliding_window"),
            "sliding_window_from": "anchor" if self.ours else "query",
            CAUSAL: self.config.get(CAUSAL, False) if self.ours else both,
        }  # fmt: skip


def _causal(config: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether blocks are causal: none of the flags means that they are not."""
    places = {GROUP: part, "config.json": config}
    said = {
        f"{name} of {place}": fields[name]
        for place, fields in places.items() for name in CAUSAL_BLOCK
        if fields.get(name) is not None
    }  # fmt: skip
    if any(type(value) is not bool for value in said.values()) or len({*said.values()}) > 1:
        raise ValueError(
            f"config.json does not say whether blocks are causal: {said}. Ask whoever made it, and "
            "let all say the same, true or false"
        )
    return any(said.values())


def _spaced(base: int | None, count: Any) -> list[int] | None:
    """The layers of a base that so many layers read, by their outputs, where none are named."""
    if base is None or count == 1:
        return None if base is None else [base // 2]
    return [round(1 + (base - 4) * place / (count - 1)) for place in range(count)]


READERS = {
    kind: Reader(
        lambda name: not name.endswith(UNUSED), partial(convert, kind),
        partial(recognizes, kind),
        partial(tables.without_copy, name=HEAD, head="base"),
    )
    for kind in sorted({kind.strategy for kind in KINDS.values()})
}  # fmt: skip
WRITERS = {"speculators": speculators, "sglang": specforge}
