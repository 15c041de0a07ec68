"""A SPACE adapter's mask tokens as inputs of a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.model.probe_inputs import ProbeInputs
from modeling_patches.weights import input_features, placement


def mask_tokens(adapter: ActiveAdapter, model: Any, noise: Tensor | None = None) -> ProbeInputs:
    """The k mask tokens as probes, with the low-rank updates if these are gated.

    Gradients flow to the adapter's parameters.

    Args:
        adapter: the adapter.
        model: the base model.
        noise: ``(..., k)`` random tokens, if mask tokens are noise; None for a fixed choice.
    """
    config: Any = adapter.config
    layer: Any = adapter.layer
    update = layer.updates.get(adapter.name) if config.update == "gated" else None
    if config.masks == "noise":
        if noise is None:
            noise = random_tokens(model, 0, config.num_mask_tokens)
        embed = model.get_input_embeddings()
        with torch.no_grad():
            embeddings = embed(noise.to(placement(model).device))
    else:
        embeddings = adapter.weights()["masks"].expand(config.num_mask_tokens, -1)
    return ProbeInputs(embeddings, update=update)


def random_tokens(model: Any, seed: int, *shape: int) -> Tensor:
    """Uniformly random tokens of the model's vocabulary: int64 of this shape, on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    known, _ = input_features(model)
    return torch.randint(known, shape, generator=generator, device="cpu")
