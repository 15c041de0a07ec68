"""Notices that tensors were replaced or written to, so that what was made of them is made anew.

A tensor's version counter is not enough: writes through `.data`, as PEFT merges, and steps of
torch's fused optimizers do not change it.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

#: Number of a tensor's entries that are compared.
SAMPLED = 64


@torch.no_grad()
def contents(tensors: Sequence[Tensor]) -> Hashable:
    """A key that changes when one of these plain tensors is replaced or written to.

    It consists of addresses, version counters and some entries of each tensor. What is not noticed
    is a write that changes none of these, such as one to a few entries through `.data`. The host
    waits for each device once. Whoever keeps the key must keep the tensors, or others could get
    their addresses.
    """
    places = tuple(
        (x.data_ptr(), x.dtype, x.device, None if x.is_inference() else x._version) for x in tensors
    )
    some: dict[torch.device, list[Tensor]] = {}
    for x in tensors:
        entries = x.detach().reshape(-1)[:: max(x.numel() // SAMPLED, 1)]
        some.setdefault(x.device, []).append(entries.float())
    # Bytes, since NaN does not equal itself.
    return places, tuple(torch.cat(parts).cpu().numpy().tobytes() for parts in some.values())
