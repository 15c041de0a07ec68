"""Writes a block drafter as speculators does, which vLLM reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.predicting import VOCABULARY, vocab_size
from hf_spec.drafting.block_diffusion.config import SCALES, SELECTOR, TYPES
from hf_spec.drafting.draft_vocabulary import HEAD, DraftVocabulary
from modeling_patches.modules import num_layers
from modeling_patches.weights import output_bias


def speculators_files(
    model: Any, adapter: ActiveAdapter
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and the tensors of ``model.safetensors``.

    Raises:
        ValueError: the adapter has what speculators does not know.
    """
    config: Any = adapter.config
    tensors, vocab = dict(adapter.weights()), vocab_size(model)
    if config.layer_type.name != TYPES[0]:
        raise ValueError(
            f"its layers are those of {config.layer_type.name}: speculators knows block drafters "
            f"with layers of {TYPES[0]} only."
        )
    if config.sliding_layers and config.sliding_window_from != "anchor":
        raise ValueError(
            f"sliding_window_from={config.sliding_window_from!r}: speculators counts windows from "
            "the anchor, so that drafts would differ."
        )
    if max(config.feature_layers) == num_layers(model):
        raise ValueError(
            f"feature_layers={config.feature_layers}: the last is the final state, which other "
            "programs give before the final norm. Train without it."
        )
    vocabulary = DraftVocabulary.of(tensors, model)
    if vocabulary is not None and VOCABULARY in tensors:
        if output_bias(model) is not None and not vocabulary.is_own:
            raise ValueError(
                f"draft_vocab_size={config.draft_vocab_size}: {type(model).__name__} has a bias of "
                "its output embeddings, which speculators does not know. Train with "
                "--draft-vocab-size 0."
            )
        ids = tensors.pop(VOCABULARY).cpu()
        tensors[HEAD] = vocabulary.weight
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        tensors["t2d"] = torch.isin(torch.arange(vocab, device=ids.device), ids)
    selects, convolves = config.markov_head == SELECTOR, bool(config.conv_kernel_size)
    if convolves != (selects and bool(config.markov_rank)):
        raise ValueError(
            f"conv_kernel_size={config.conv_kernel_size} with markov_head={config.markov_head!r}, "
            f"markov_rank={config.markov_rank}: speculators knows convolutions and a selector only "
            "together."
        )
    scales = {theirs: getattr(config, name) for name, theirs in SCALES.items()}
    scales = {name: one for name, one in scales.items() if one not in (1.0, None)}
    if scales and not convolves:
        raise ValueError(
            f"{scales}: speculators knows such scales only of drafters with convolutions and a "
            "selector."
        )
    kind, named = ("dspark", "DSpark") if config.markov_rank else ("dflash", "DFlash")
    if convolves:
        kind, named = "dflash2", "DFlash2"
    layers = {**config.layer_config, "vocab_size": vocab, "model_type": TYPES[0]}
    windowed = config.sliding_layers or []
    kinds = ["full_attention"] * config.num_layers
    for layer in windowed:
        kinds[layer] = "sliding_attention"
    layers |= {
        "num_hidden_layers": config.num_layers, "layer_types": kinds,
        "sliding_window": config.sliding_window, "use_sliding_window": bool(windowed),
        "attention_dropout": 0.0, "tie_word_embeddings": False,
    }  # fmt: skip
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": config.distances, "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }  # fmt: skip
    name = config.base_model_name_or_path or model.config.name_or_path
    description: dict[str, Any] = {
        "architectures": [f"{named}DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": name,
                "architectures": model.config.architectures or [type(model).__name__],
            },
        },
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": config.feature_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        # Without windows it has no effect in speculators; if False, vLLM runs all layers causally.
        "sliding_window_non_causal": config.sliding_window_non_causal or not windowed,
        "draft_vocab_size": config.draft_vocab_size or vocab,
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
    }  # fmt: skip
    if convolves:
        description |= {
            "selector_rank": config.markov_rank, "selector_top_k": config.selector_top_k,
            "conv_kernel_size": config.conv_kernel_size, "conv_group_size": config.conv_group_size,
            **scales,
        }  # fmt: skip
    elif config.markov_rank:
        description |= {
            "markov_rank": config.markov_rank, "markov_head_type": config.markov_head,
            "enable_confidence_head": config.confidence_head != "none",
            "confidence_head_with_markov": config.confidence_head == "markov",
        }  # fmt: skip
    return description, tensors
