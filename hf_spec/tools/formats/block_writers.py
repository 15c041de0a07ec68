"""Block drafters as speculators and SpecForge write them; see :mod:`.blocks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.module import Adapter
from hf_spec.adapters.predicting import VOCABULARY, vocab_size
from hf_spec.drafting.draft_vocabulary import HEAD, DraftVocabulary
from hf_spec.modeling_patches.modules import num_layers
from hf_spec.modeling_patches.weights import output_bias
from hf_spec.tools.formats import block_kinds as kinds
from hf_spec.tools.formats import tables
from hf_spec.tools.formats.tables import OF_DEEPSPEC


def _kind_to_write(config: Any) -> str:
    """Which of :data:`KINDS` an adapter is; a ValueError if it is none.

    Convolutions are those of DFlash 2, and only beside its selector."""
    head = config.markov_head if config.markov_rank else None
    if bool(config.conv_kernel_size) != (head == "selector"):
        raise ValueError(
            f"conv_kernel_size={config.conv_kernel_size} with "
            f"markov_head={config.markov_head!r}, markov_rank={config.markov_rank}: other programs "
            "know convolutions and a selector only together."
        )
    own = (
        name for name, kind in kinds.KINDS.items() if kind.head is not None and kind.head == head
    )
    return next(own, "dspark" if head else "dflash")


def _written(
    model: Any, config: Any, name: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Theirs of our fields, scales that are on, and the config of the layers, of a kind.

    Raises:
        ValueError: no format has this.
    """
    types = ["sliding_attention" if layer in (config.sliding_layers or []) else "full_attention"
             for layer in range(config.num_layers)]  # fmt: skip
    scales = {theirs: getattr(config, ours) for ours, theirs in kinds.SCALES.items()}
    tables.refuse({
        f"its layers are those of {config.architecture}: others know block drafters with "
        f"layers of {kinds.TYPES[0]} only.": config.architecture != kinds.TYPES[0],
        f"layers={config.layers}: the last is the final state, which others give "
        "before the final norm. Train without it.":
        max(config.layers) == num_layers(model),
        f"confidence_head={config.confidence_head!r}: others know it beside DSpark's Markov heads "
        "only.": config.confidence_head != "none" and name != "dspark",
    })  # fmt: skip
    table = kinds.FIELDS | dict(kinds.KINDS[name].fields)
    fields = {theirs: getattr(config, ours) for ours, theirs in table.items()}
    if name == "dspark":
        head = config.confidence_head
        fields |= dict(zip(kinds.CONFIDENCE_HEAD, (head != "none", head == "markov")))
    layers = {
        **tables.written_layers(config, vocab_size(model)),
        "layer_types": types, "sliding_window": config.sliding_window,
        "use_sliding_window": bool(config.sliding_layers), "attention_dropout": 0.0,
    }  # fmt: skip
    return fields, {one: x for one, x in scales.items() if x not in (1.0, None)}, layers


def speculators(model: Any, adapter: Adapter) -> dict[str, Any]:
    """``config.json`` and tensors as speculators writes them.

    Raises:
        ValueError: the adapter has what speculators does not know.
    """
    config: Any = adapter.config
    name, tensors, known = _kind_to_write(config), dict(adapter.tensors()), vocab_size(model)
    fields, scales, layers = _written(model, config, name)
    vocabulary = DraftVocabulary.of(tensors, model) if VOCABULARY in tensors else None
    rank, width = config.markov_rank, config.markov_width
    tables.refuse({
        f"markov_head={config.markov_head!r}: speculators does not know such drafters. Give "
        "--format sglang.": name in ("domino", "dspine"),
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
    architecture = f"{kinds.KINDS[name].name}DraftModel"
    written = tables.speculators_config(model, config, name, architecture, config.distances, layers)
    written |= fields | scales
    if name == "xpress":
        written |= {kinds.RATIO: width // rank, "num_jacobi_passes": config.distances}
    if config.causal:
        *of_group, alone = kinds.CAUSAL_BLOCK
        written |= {kinds.GROUP: dict.fromkeys(of_group, True), alone: True}
    return {
        tables.CONFIG: {
            **written,
            kinds.IDS: config.layers,
            # Without windows it has no effect in speculators; if False, vLLM runs all layers
            # causally.
            kinds.CAUSAL: not config.causal
            and (config.sliding_window_non_causal or not config.sliding_layers),
            "draft_vocab_size": config.draft_vocab_size or known,
            "dtype": _dtype(tensors),
        },
        tables.WEIGHTS: tensors,
    }


def specforge(model: Any, adapter: Adapter) -> dict[str, Any]:
    """``config.json`` and tensors as SpecForge writes them, and SGLang reads.

    Raises:
        ValueError: the adapter has what they do not know.
    """
    config: Any = adapter.config
    name, tensors = _kind_to_write(config), dict(adapter.tensors())
    fields, scales, layers = _written(model, config, name)
    sliding, kind = bool(config.sliding_layers), kinds.KINDS[name]
    tables.refuse({
        f"markov_head={config.markov_head!r}: SGLang does not know such drafters. Give --format "
        "speculators.": name == "xpress",
        f"draft_vocab_size={config.draft_vocab_size}: SGLang's block drafters draft all tokens. "
        "Train with --draft-vocab-size 0.": VOCABULARY in tensors,
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
    groups = {kinds.GROUP: {**fields, **scales, OF_DEEPSPEC: [one - 1 for one in config.layers]}}
    groups[kind.group] = groups.get(kind.group, {}) | own
    if name not in ("dflash", "dflash2", "dspine"):
        groups[kinds.GROUP]["projector_type"] = name
    written: dict[str, Any] = {
        **layers, "architectures": [f"{kind.name}DraftModel"], **groups,
        "rope_theta": layers["rope_parameters"].get("rope_theta"),
        "block_size": config.block_size, "num_target_layers": num_layers(model),
        "dtype": _dtype(tensors),
    }  # fmt: skip
    if config.causal:
        *of_group, alone = kinds.CAUSAL_BLOCK
        groups[kinds.GROUP] |= dict.fromkeys(of_group, True)
        written[alone] = True
    elif sliding and config.sliding_window_non_causal:
        written["is_causal"] = False
    if name == "domino":
        written["emb_dim"] = config.markov_rank
    if name == "dspine":
        tensors[kinds.READY] = torch.tensor(True)
    return {tables.CONFIG: written, tables.WEIGHTS: tensors}


def _dtype(tensors: Mapping[str, Tensor]) -> str:
    return str(tensors["fc.weight"].dtype).removeprefix("torch.")
