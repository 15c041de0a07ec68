"""Layers for multi-token prediction of the tests' models, whose checkpoints have none."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from hf_spec.modeling_patches.mtp import MtpLayers


def random_layers(
    model: Any, device: torch.device, dtype: torch.dtype, count: int = 1, sparse: bool = True
) -> MtpLayers:
    """Layers of random weights."""
    layers = MtpLayers(model, count, sparse)
    generator = torch.Generator("cpu").manual_seed(4)
    state = {}
    for name, tensor in layers.layers.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator, device="cpu")
        value = 0.2 * noise if tensor.ndim > 1 else 1 + 0.1 * noise
        state[name] = value.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
    layers.layers.load_state_dict(state, assign=True)
    layers.place(device)
    return layers.requires_grad_(False).eval()


def read_or_random(read: Callable[..., MtpLayers]) -> Callable[..., MtpLayers]:
    """In place of the function that reads a model's layers: random ones where there are none."""

    @functools.wraps(read)
    def read_or_make(model: Any, device: torch.device, dtype: torch.dtype) -> MtpLayers:
        try:
            return read(model, device, dtype)
        except ValueError:
            return random_layers(model, device, dtype)

    return read_or_make
