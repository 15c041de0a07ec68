"""Writes a MEDUSA adapter for vLLM up to 0.32; vLLM 0.33 has no Medusa.

vLLM (``vllm/model_executor/models/medusa.py``) takes a folder with ``config.json`` of model type
``medusa`` and safetensors named ``blocks.<head>.layers.<block>.weight`` and ``.bias`` (the latter
with ``medusa_fc_bias``), and ``lm_heads.<head>.weight``, or with ``original_lm_head`` one
``lm_head.weight`` for all heads, a copy of the base's. ``n_predict`` is the default number of
drafted tokens. The loader's code has a ``token_map`` of the predicted tokens, but 0.32.0 refuses
files with one, so the heads there predict all tokens.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.predicting import BEFORE, ROOT_BEFORE
from hf_spec.drafting.heads import BIASES, PROJECTION, WEIGHTS
from modeling_patches.weights import output_bias, output_weight

logger = logging.getLogger(__name__)


def vllm_files(model: Any, adapter: ActiveAdapter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and the tensors of ``model.safetensors``.

    A transition and a root correction are dropped with a warning, as vLLM's heads do not see the
    tokens before.

    Args:
        model: the base model.
        adapter: the adapter.

    Raises:
        ValueError: the model's output embeddings have a bias, are quantised, or have other tokens
            than the heads; vLLM's do not.
    """
    weight = output_weight(model)
    if output_bias(model) is not None or weight is None or not weight.is_floating_point():
        raise ValueError(
            f"{type(model).__name__} has output embeddings with a bias or quantised ones: vLLM's "
            "Medusa heads have neither."
        )
    weights = adapter.weights()
    if BEFORE in weights or ROOT_BEFORE in weights:
        logger.warning(
            "vLLM's Medusa heads draft each token without knowing those before it: the adapter's "
            "transition and root correction are left out, and fewer drafts are accepted than here. "
            "Heads that are trained with --transition-rank 0 lose nothing."
        )
    blocks = weights[WEIGHTS]
    heads, layers, hidden, _ = blocks.shape
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            name = f"blocks.{head}.layers.{layer}"
            tensors[f"{name}.weight"] = blocks[head, layer]
            tensors[f"{name}.bias"] = weights[BIASES][head, layer]
    own = weights.get(PROJECTION)
    if own is not None and own.shape[1] != weight.shape[0]:
        raise ValueError(
            f"the heads predict {own.shape[1]} tokens, {type(model).__name__} has "
            f"{weight.shape[0]}: export with the model before its vocabulary was resized."
        )
    if own is None:
        tensors["lm_head.weight"] = weight
    else:
        tensors |= {f"lm_heads.{head}.weight": part for head, part in enumerate(own)}
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": hidden,
        "vocab_size": weight.shape[0], "truncated_vocab_size": weight.shape[0],
        "num_heads": heads, "num_hidden_layers": layers, "n_predict": heads,
        "medusa_fc_bias": True, "original_lm_head": own is None,
        "dtype": str(blocks.dtype).removeprefix("torch."),
    }  # fmt: skip
    return config, tensors
