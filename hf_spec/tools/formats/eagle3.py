"""Released EAGLE-3 drafters.

Formats, by their ``config.json``: speculators' (RedHatAI), whose decoder is described by a part of
it; flat ones, which are a Llama's config (SafeAILab, AngelSlim), with ``eagle_config`` in those of
SpecForge and ModelOpt, as SGLang (0.5.23) reads it; and DeepSpec's, the base's config with
``target_layer_ids``, whose layers may be those of Gemma 4.
"""

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.config import vocab_size
from hf_spec.adapters.layer import Adapter
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.weights import device_of
from hf_spec.predict.decoder import ARCHITECTURES, LayerType
from hf_spec.predict.markov import HEAD
from hf_spec.target.hidden_states import RowEmbeddings
from hf_spec.tools.formats import tables
from hf_spec.tools.formats.tables import ANY, KIND, OF_DEEPSPEC, USUAL, Files, Reader

#: Fields that all formats have.
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
#: Kinds of speculators, the second one (P-EAGLE) drafting all tokens in one forward.
KINDS = ("eagle3", "peagle")
IDS, GROUP = "eagle_aux_hidden_state_layer_ids", "eagle_config"
#: Where the layers that are read are named, and which of ``output_hidden_states`` number 0 is.
LAYERS = ((IDS, "", 0), (IDS, GROUP, 1), (OF_DEEPSPEC, "", 1))
#: Prefixes of names of tensors, and ours: those of models, SGLang's, and those of SpecForge's first
#: EAGLE 3.1. Other names are the adapter's.
OF_MODELS, OF_SGLANG = ("model.", ""), ("midlayer.", "layers.0.")
NAMES = (
    OF_MODELS, OF_SGLANG, ("aux_norm_low.", "fc_norm.0."), ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)  # fmt: skip
#: What belongs to training, or follows from the config.
UNUSED = re.compile(r"(.+\.)?rotary_emb\..+|verifier_.+")
#: What a flag is without a field: whether there is such a tensor.
BY_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
#: Fields of ``eagle_config``, with the values with which the decoder is EAGLE-3's.
IN_GROUP: dict[str, Any] = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
    "parallel_draft_step": 1,
    **dict.fromkeys(
        ("parallel_draft_heads_num_layers", "has_lm_head", "head_dim", "eagle_decoder_type",
         "draft_vocab_size", IDS, *FLAGS), ANY,
    ),
}  # fmt: skip
#: Switches that are on and change nothing here, and those that are read.
SWITCHES = dict.fromkeys(
    ("embed_requires_grad", "return_dict", "tie_word_embeddings", "use_cache", *FLAGS), ANY
)
EMBEDDINGS, FUSION = "embed_tokens.weight", "fc.weight"
#: Output rows of ``fc`` that AngelSlim's early stopping adds at most.
EARLY_STOP = 3
#: What SGLang's decoder is.
OF_SGLANG_ONLY: dict[str, Any] = {
    "architecture": "llama", "num_layers": 1, "norm_before_residual": False,
    "norm_before_fc": False, "mask_token_id": None,
}  # fmt: skip
#: Draft tokens of a step, and layers that are read, that vLLM takes unless told otherwise.
DRAFTED, USUAL_LAYERS = 5, 3


def recognizes(config: Mapping[str, Any], names: Collection[str]) -> bool:
    own = {tables.own_name(name, NAMES) for name in names}
    return {FUSION, "layers.0.hidden_norm.weight"} <= own


def convert(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Files:
    """Fields of ``Eagle3Config`` and the adapter's parameters, from a released checkpoint."""
    layers, found = tables.described(config), tables.renamed(tensors, NAMES)
    if config.get(KIND) not in (None, *KINDS):
        read = " and ".join(map(repr, KINDS))
        raise ValueError(f"{KIND}={config[KIND]!r} in config.json: {read} are read")
    kind = tables.layer_type(layers, ARCHITECTURES, None, OF_DEEPSPEC in config)
    own = tables.group(config, GROUP)
    fields = tables.layer_fields(layers, kind)
    _check_switches(config, layers, own, kind)
    fields |= {name: BY_TENSORS.get(name) in found for name in FLAGS}
    fields |= tables.fields_of(tables.merged(config, own), dict(zip(FLAGS, FLAGS)))
    if OF_DEEPSPEC in config:
        fields["logit_softcap"] = layers.get("final_logit_softcapping")
    if config.get(KIND) == KINDS[1]:
        tables.check_size("mask_token_id", config.get("mask_token_id"), low=0)
        fields["mask_token_id"] = config["mask_token_id"]
    for name, part, first in LAYERS:
        if ids := tables.group(config, part).get(name):
            fields["layers"] = tables.numbered(ids, first)
            break

    hidden, fusion, known = fields["hidden_size"], found.get(FUSION), layers.get("vocab_size")
    if fusion is not None and fusion.ndim == 2 and 0 < len(fusion) - hidden <= EARLY_STOP:
        found[FUSION] = fusion[:hidden]
    tables.check_size("vocab_size", known)
    if HEAD not in found:
        raise ValueError(f"it has no tensor {HEAD!r}, which draft tokens are chosen with")
    stated = config.get("draft_vocab_size")
    fields["draft_vocab_size"] = tables.take_vocabulary(found, int(known or 0), stated)
    fields["own_embeddings"] = EMBEDDINGS in found
    return fields, found


def _check_switches(
    config: Mapping[str, Any], layers: Mapping[str, Any], own: Mapping[str, Any], kind: LayerType
) -> None:
    """Raise a ValueError for what is on and is not known, or not supported."""
    tables.check_known({n: v for n, v in own.items() if v or n in IN_GROUP}, IN_GROUP, f"{GROUP}.")
    for name in ("attention_bias", "mlp_bias"):
        if layers.get(name):
            raise ValueError(f"{name}={layers[name]!r} in config.json: layers without are read")
    on = {name: one for part in (config, layers) for name, one in part.items() if one is True}
    tables.check_known(on, SWITCHES | dict.fromkeys(kind.own, ANY))


def speculators(model: Any, adapter: Adapter) -> dict[str, Any]:
    """``config.json`` and tensors in speculators' format, with the base's embeddings, as
    speculators would leave them random."""
    config: Any = adapter.config
    tables.refuse({
        f"architecture={config.architecture!r}: speculators reads layers of {' and '.join(USUAL)}.":
        config.architecture not in USUAL,
    })  # fmt: skip
    layers, tensors = _written(model, adapter)
    if EMBEDDINGS not in tensors:
        module, scale = model.get_input_embeddings(), config.embedding_scale
        rows = module if scale is None else RowEmbeddings(model)
        with torch.no_grad():
            ids = torch.arange(vocab_size(model), device=device_of(module))
            tensors[EMBEDDINGS] = (rows(ids) * (scale or 1.0)).to(tensors[FUSION].dtype)
    parallel = config.mask_token_id is not None
    kind, name = KINDS[parallel], ("PEagle" if parallel else "Eagle3") + "DraftModel"
    written = tables.speculators_config(model, config, kind, name, DRAFTED, layers) | {
        "draft_vocab_size": len(tensors[HEAD]),
        IDS: config.layers,
        **{name: getattr(config, name) for name in FLAGS},
    }
    if parallel:
        written["mask_token_id"] = config.mask_token_id
    if len(config.layers) != USUAL_LAYERS:
        written["num_aux_hidden_states"] = len(config.layers)
    return {tables.CONFIG: written, tables.WEIGHTS: tensors}


def sglang(model: Any, adapter: Adapter) -> dict[str, Any]:
    """``config.json`` and tensors as SGLang reads them."""
    config: Any = adapter.config
    tables.refuse({
        f"{name}={getattr(config, name)!r}: SGLang reads only {wanted!r}.":
        getattr(config, name) != wanted
        for name, wanted in OF_SGLANG_ONLY.items()
    })  # fmt: skip
    layers, tensors = _written(model, adapter)
    tables.refuse({
        f"{type(model).__name__} scales or norms its embeddings, SGLang gives drafters the rows of "
        "the matrix. Export with --format speculators.":
        config.embedding_scale is None and not RowEmbeddings(model).plain,
        f"layers={config.layers}: SGLang gives no states of the embeddings, 0.": 0 in config.layers,
    })  # fmt: skip
    ids = [layer - 1 for layer in config.layers]
    written = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layers,
        "draft_vocab_size": len(tensors[HEAD]),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        GROUP: {IDS: ids, "use_aux_hidden_state": True},
    }
    return {tables.CONFIG: written, tables.WEIGHTS: tables.renamed(tensors, [OF_SGLANG[::-1]])}


def _written(model: Any, adapter: Adapter) -> Files:
    """The config of the decoder's layers, with all that engines ask for, and tensors."""
    config: Any = adapter.config
    count = num_layers(model)
    tables.refuse({
        f"logit_softcap={config.logit_softcap}: engines do not cap the logits of such drafters.":
        config.logit_softcap is not None,
        f"layers={config.layers}: engines give the states of the last layer, {count}, before the "
        "final norm, and it was trained with those after it.": max(config.layers) == count,
    })  # fmt: skip
    tensors = {name: one.detach() for name, one in adapter.tensors().items()}
    tables.put_vocabulary(tensors, vocab_size(model))
    layers = tables.written_layers(config, vocab_size(model))
    return {**layers, "attention_bias": False, "mlp_bias": False}, tensors


def wants(name: str) -> bool:
    return UNUSED.fullmatch(name) is None


share = partial(tables.without_copy, name=EMBEDDINGS, own_embeddings=False)
READERS = {"eagle3": Reader(wants, convert, recognizes, share)}
WRITERS = {"speculators": speculators, "sglang": sglang}
