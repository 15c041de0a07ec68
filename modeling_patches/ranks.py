"""The ranks of a model with tensor parallelism, which must make the same choices.

Each rank runs the same calls on its share of the weights. Choices by time or random numbers are
those of the first rank; otherwise the shapes of their forwards would differ.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from hf_spec.modeling_patches.weights import placement


class Ranks:
    """The ranks of a model, :attr:`size` in number; a single one if it is not split."""

    def __init__(self, model: Any):
        self.size = tensor_parallel_size(model)
        self._device = placement(model).device
        self._group: Any = None
        if self.size > 1:
            mesh = getattr(model, "_device_mesh", None)
            names = getattr(mesh, "mesh_dim_names", None) or ()
            if mesh is not None:
                self._group = mesh.get_group("tp" if "tp" in names else None)

    def same(self, numbers: Sequence[float]) -> list[float]:
        """The first rank's numbers; all ranks call this with equally many."""
        if self.size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        distributed.broadcast(values, group=self._group, group_src=0)
        return values.tolist()

    def share_random_state(self) -> None:
        """Set the random state of all ranks to that of the first."""
        if self.size == 1:
            return
        shared = random_state(self._device).to(self._device)
        distributed.broadcast(shared, group=self._group, group_src=0)
        set_random_state(self._device, shared.cpu())

    def own_heads(self, states: Tensor, heads: int) -> Tensor:
        """This rank's share of prefix KV, ``(kv_heads, slots, head_dim)``, of which it has
        ``heads``."""
        if self.size == 1 or states.shape[0] != self.size * heads:
            return states
        return states.narrow(0, distributed.get_rank(self._group) * heads, heads)


def tensor_parallel_size(model: Any) -> int:
    """Number of ranks that the layers of a model are split over; 1 if they are not."""
    return getattr(model, "_tp_size", None) or 1


# -- modules that are split ------------------------------------------------------------------------


def own_share(factor: Tensor, size: int, dim: int, module: nn.Module) -> Tensor:
    """The part of a whole module's factor that belongs to this rank's part of it, of ``size``
    features along ``dim``."""
    if factor.shape[dim] == size:
        return factor
    mesh = _mesh(module)
    start = mesh.get_local_rank() * -(-factor.shape[dim] // mesh.size())  # the last may be shorter
    return factor.narrow(dim, start, size)


def summed(partial: Tensor, module: nn.Module) -> Tensor:
    """The sum of the partial results of all ranks of a module."""
    total = partial.contiguous()
    distributed.all_reduce(total, group=_mesh(module).get_group())
    return total


def _mesh(module: nn.Module) -> Any:
    weight: Any = module.weight
    mesh = weight.device_mesh
    return mesh["tp"] if mesh.ndim > 1 else mesh


# -- the state of a device's default random generator ----------------------------------------------


def random_state(device: torch.device) -> Tensor:
    """The state, as bytes on the host."""
    module, which = _generators(device)
    return module.get_rng_state(*which)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state to what :func:`random_state` gave."""
    module, which = _generators(device)
    module.set_rng_state(state, *which)


@contextmanager
def same_draws(device: torch.device) -> Iterator[None]:
    """What is drawn after the block is what would have been drawn without it, here and on a CPU."""
    states = {one: random_state(one) for one in (torch.device("cpu"), device)}
    try:
        yield
    finally:
        for one, state in states.items():
            set_random_state(one, state)


def _generators(device: torch.device) -> tuple[Any, tuple[Any, ...]]:
    """The module with a device's generator, and how it is told the device: Apple's knows one."""
    if device.type == "cpu":
        return torch, ()
    return torch.get_device_module(device), () if device.type == "mps" else (device,)
