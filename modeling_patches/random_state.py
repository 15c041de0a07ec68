"""The state of a device's default random generator, which sampling draws from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """The state, as bytes on the host."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(*_index(device))
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state to what :func:`random_state` gave."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_index(device))


def _index(device: torch.device) -> tuple[Any, ...]:
    """How the device's module is told the device: Apple's knows only one, and takes none."""
    return () if device.type == "mps" else (device,)
