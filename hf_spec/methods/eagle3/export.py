"""Writes an EAGLE3 adapter as vLLM and speculators (0.9.0), or SGLang (0.5.23), read drafters.

speculators' layout keeps the adapter's names, and counts layers as ``output_hidden_states`` does.
SGLang reads a Llama's config with ``eagle_config``, which counts them one lower, and one layer
whose residual is the feature itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.predicting import VOCABULARY, vocab_size
from hf_spec.methods.eagle3.adapter import FLAGS, SIZES
from hf_spec.methods.eagle3.network import Eagle3Network
from hf_spec.methods.eagle3.published import EAGLE3, LAYER_IDS, PARALLEL, USUAL
from hf_spec.model.row_embeddings import RowEmbeddings
from modeling_patches.modules import num_layers
from modeling_patches.weights import device_of

#: Draft tokens of a step that engines take unless told otherwise.
DRAFTED = 5
#: Layers that vLLM expects unless told otherwise.
USUAL_LAYERS = 3
EMBEDDINGS = "embed_tokens.weight"

Files = tuple[dict[str, Any], dict[str, Tensor]]


def speculators_files(model: Any, adapter: ActiveAdapter) -> Files:
    """``config.json`` and tensors in speculators' layout.

    With the base's embeddings, as speculators would leave them random.

    Raises:
        ValueError: it reads the final hidden states, which engines give before the norm.
    """
    config, tensors = adapter.config, _tensors(model, adapter)
    if config.architecture not in USUAL:
        raise ValueError(
            f"architecture={config.architecture!r}: speculators reads layers of "
            f"{' and '.join(USUAL)}."
        )
    _check_layers(model, config)
    if EMBEDDINGS not in tensors:
        network = Eagle3Network(model, adapter.module)
        with torch.no_grad():
            ids = torch.arange(vocab_size(model), device=device_of(model.get_input_embeddings()))
            tensors[EMBEDDINGS] = network.embedded(ids).to(tensors["fc.weight"].dtype)
    base, parallel = model.config, config.mask_token_id is not None
    kind = PARALLEL if parallel else EAGLE3
    written = {
        "architectures": ["PEagleDraftModel" if parallel else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [
                {
                    "proposal_type": "greedy", "speculative_tokens": DRAFTED,
                    "verifier_accept_k": 1, "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": base.name_or_path,
                "architectures": base.architectures or [type(model).__name__],
            },
        },
        "transformer_layer_config": _layers_config(model, config),
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        LAYER_IDS: config.layers,
        **{name: getattr(config, name) for name in FLAGS},
        "tie_word_embeddings": False,
    }  # fmt: skip
    if parallel:
        written["mask_token_id"] = config.mask_token_id
    if len(config.layers) != USUAL_LAYERS:
        written["num_aux_hidden_states"] = len(config.layers)
    return written, tensors


def sglang_files(model: Any, adapter: ActiveAdapter) -> Files:
    """``config.json`` and tensors as SGLang reads them.

    Raises:
        ValueError: SGLang has no such decoder; the message names the field.
    """
    config, tensors = adapter.config, _tensors(model, adapter)
    read = {
        "architecture": "llama", "num_layers": 1, "norm_before_residual": False,
        "norm_before_fc": False, "mask_token_id": None,
    }  # fmt: skip
    for name, wanted in read.items():
        if getattr(config, name) != wanted:
            raise ValueError(f"{name}={getattr(config, name)!r}: SGLang reads only {wanted!r}.")
    _check_layers(model, config)
    if config.embedding_scale is None and not RowEmbeddings(model).plain:
        raise ValueError(
            f"{type(model).__name__} scales or norms its embeddings, SGLang gives drafters the "
            "rows of the matrix. Export with --format speculators."
        )
    if 0 in config.layers:
        raise ValueError(f"layers={config.layers}: SGLang gives no states of the embeddings, 0.")
    layers = {LAYER_IDS: [layer - 1 for layer in config.layers], "use_aux_hidden_state": True}
    written = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layers_config(model, config),
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": layers,
    }
    renamed = {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items()}
    return written, renamed


def _tensors(model: Any, adapter: ActiveAdapter) -> dict[str, Tensor]:
    """Its parameters, with ``d2t`` and ``t2d`` in place of the ids of draft tokens."""
    tensors = {name: one.detach() for name, one in adapter.weights().items()}
    ids = tensors.pop(VOCABULARY, None)
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        tensors["t2d"] = torch.zeros(vocab_size(model), dtype=torch.bool, device=ids.device)
        tensors["t2d"][ids] = True
    return tensors


def _layers_config(model: Any, config: Any) -> dict[str, Any]:
    """The config of its decoder layers, with all that engines ask for."""
    of_layers = config.of_layers()
    return {
        "model_type": config.architecture,
        **{name: getattr(config, name) for name in SIZES},
        "num_hidden_layers": config.num_layers,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(of_layers.rope_parameters),
        "vocab_size": vocab_size(model),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _check_layers(model: Any, config: Any) -> None:
    if config.logit_softcap is not None:
        raise ValueError(
            f"logit_softcap={config.logit_softcap}: engines do not cap the logits of such drafters."
        )
    if max(config.layers) == num_layers(model):
        raise ValueError(
            f"layers={config.layers}: engines give the states of the last layer, "
            f"{num_layers(model)}, before the final norm, and it was trained with those after it."
        )
