"""Notices that tensors were replaced or written to, so that what was made of them is made anew.

A tensor's version counter is not enough: writes through `.data`, as PEFT merges, and steps of
torch's fused optimizers do not change it.
"""

import functools
import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def contents(tensors: Sequence[Tensor]) -> Hashable:
    """A key that changes when one of these plain tensors is replaced or written to.

    It consists of addresses, version counters and at least one entry of each row and column. A
    write that changes none of these is not noticed: one to single entries through `.data`. The host
    waits for each device once. Whoever keeps the key must keep the tensors, or others could get
    their addresses.
    """
    places = tuple(
        (x.data_ptr(), x.dtype, x.device, None if x.is_inference() else x._version) for x in tensors
    )
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
