"""Notices that tensors were replaced or written to, so that what was made of them is made anew.

A tensor's version counter is not enough: writes through `.data`, as PEFT merges, and steps of
torch's fused optimizers do not change it. Steps of optimizers are counted here.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

#: The last step of an optimizer that wrote to each storage, by its address.
_written: dict[int, int] = {}
_steps = itertools.count()


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a compiled step counts as a write
    step, groups = next(_steps), optimizer.param_groups
    every = (x for group in groups for x in group["params"])
    trained = [x for x in every if x.grad is not None and type(x.data) is Tensor]
    _written.update((x.untyped_storage().data_ptr(), step) for x in trained)


register_optimizer_step_post_hook(_note_step)

Made = TypeVar("Made")


@torch.no_grad()
def weights_version(tensors: Sequence[Tensor]) -> Hashable:
    """A key that changes when one of these plain tensors is replaced or written to.

    It consists of addresses, version counters, steps of optimizers, and at least one entry of each
    row and column. A write that changes none of these is not noticed: one to single entries through
    `.data`. The host waits for each device once. Whoever keeps the key must keep the tensors, or
    others could get their addresses.
    """
    places = tuple(
        (
            x.data_ptr(), x.dtype, x.device, None if x.is_inference() else x._version,
            _written.get(x.untyped_storage().data_ptr()),
        )
        for x in tensors
    )  # fmt: skip
    some: dict[torch.device, list[Tensor]] = {}
    for x in tensors:
        entries = x.detach().reshape(-1)[:: _stride(x.shape)]
        some.setdefault(x.device, []).append(entries.float())
    # Bytes, since NaN does not equal itself.
    return places, tuple(torch.cat(parts).cpu().numpy().tobytes() for parts in some.values())


@functools.cache
def _stride(shape: torch.Size) -> int:
    """The largest step through the entries of a shape that meets each row and each column."""
    columns = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // max(columns, 1)
    most = max(min(rows, columns - 1), 1)
    return next(step for step in range(most, 0, -1) if math.gcd(step, columns) == 1)


def made_anew(
    store: MutableMapping[Any, Any], owner: Any, tensors: Sequence[Tensor],
    make: Callable[[], Made], others: Any = None,
) -> Made:  # fmt: skip
    """What ``store`` has for an owner; made anew where these tensors, or what else it depends on,
    have changed."""
    key = weights_version(tensors), others
    known = store.get(owner)
    if known is None or known[0] != key:
        known = None
        store.pop(owner, None)  # frees it before what takes its place is allocated
        with torch.inference_mode(False), torch.no_grad():  # training may use it later
            # With the tensors, but not the parameters, whose owner could not be freed.
            known = store[owner] = key, [tensor.data for tensor in tensors], make()
    made: Made = known[2]
    return made
