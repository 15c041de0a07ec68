"""Where a model's weights are and how to read them, also if accelerate has offloaded them.

An offloaded weight has no data outside its module's forward: a hook of accelerate brings it to the
device that the module computes on, and drops it afterwards. Calling modules therefore works as
always; what reads weights directly does so within :func:`loaded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Placement(NamedTuple):
    """Where a module computes, and in which dtype its weight is."""

    device: torch.device
    dtype: torch.dtype


def placement(model: Any) -> Placement:
    """The device and dtype of a model's input embeddings, which are never quantised.

    On the meta device if the model has no weights, as opposed to offloaded ones.
    """
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = getattr(embeddings, "weight", None)
    if weight is None:
        weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is None:
        return Placement(torch.device("cpu"), torch.get_default_dtype())
    return Placement(_device(embeddings, weight), weight.dtype)


def device_of(module: Any) -> torch.device:
    """The device that a module with a weight computes on."""
    return _device(module, module.weight)


def _device(module: Any, weight: Tensor) -> torch.device:
    if weight.is_meta:
        for hook in _hooks(module):
            place = getattr(hook, "execution_device", None)
            if place is not None:
                return torch.device(place)
    return weight.device


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Within the block, the module's own weights have data; tensors taken from it keep it."""
    hooks: list[Any] = []
    if any(one.is_meta for one in chain(module.parameters(False), module.buffers(False))):
        hooks = [hook for hook in _hooks(module) if getattr(hook, "offload", False)]
    for hook in hooks:
        hook.pre_forward(module)
    try:
        yield
    finally:
        for hook in hooks:
            hook.post_forward(module, None)


def held(container: Any, name: str) -> Tensor:
    """A tensor of a ``ParameterDict`` or the like."""
    with loaded(container):
        tensor: Tensor = container[name]
        return tensor


def _hooks(module: Any) -> tuple[Any, ...]:
    """accelerate's hooks of a module."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))
