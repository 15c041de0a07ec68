"""Attention masks: that of a tree, and what else limits attention, to be joined by ``&``.

Each but :func:`packed` is ``(batch, 1, query, key)`` bool, True = attend. Keys are slots of the
cache, whose row ``r`` holds ``lengths[r]`` accepted tokens followed by the nodes of the tree; that
of a layer with a window holds the last of them, in a ring.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def places(ends: Tensor, slots: int) -> Tensor:
    """Which token is in each slot of a ring that holds a row's last ones, ``(batch, slots)``.

    Token ``i`` is written to slot ``i % slots``. Where a ring has not come round yet, and in one
    that never does, slot ``i`` is token ``i``'s, written or not.

    Args:
        ends: ``(batch,)`` tokens, and nodes behind them, that have a slot.
        slots: of each row.
    """
    own = torch.arange(slots, device=ends.device)
    rounds = (ends[:, None] - 1 - own).div(slots, rounding_mode="floor")
    return own + rounds.clamp(min=0) * slots


def tree(ancestors: Tensor, lengths: Tensor, held: Tensor) -> Tensor:
    """The mask of a tree's nodes: each sees its row's prefix, itself and its ancestors.

    Args:
        ancestors: ``(batch, query, nodes)`` bool.
        lengths: ``(batch,)`` tokens of the prefix; node ``i`` is token ``lengths[row] + i``.
        held: ``(batch or 1, keys)`` the token in each slot.

    Returns:
        ``(batch, 1, query, keys)`` bool, True = attend.
    """
    count, nodes = ancestors.shape[1:]
    # A column for the prefix, one for each node and one for what is behind them.
    seen = pad(pad(ancestors, (1, 0), value=True), (0, 1))
    column = (held + 1 - lengths[:, None]).clamp(0, nodes + 1)[:, None].expand(-1, count, -1)
    return seen.gather(2, column)[:, None]


def packed(
    ancestors: Tensor, lengths: Tensor, begin: Tensor | None = None, front: Tensor | None = None
) -> Tensor:
    """The mask of a tree's nodes in the few numbers that
    :func:`hf_spec.modeling_patches.attention_masks.unpacked` reads.

    Args:
        ancestors, lengths: as for :func:`tree`.
        begin: ``(batch, query)`` the first slot of the prefix that each sees; None: all.
        front: ``(batch, query, slots)`` bool, what each sees of slots before the prefix, which
            ``begin`` and ``lengths`` do not count; None if there are none.

    Returns:
        ``(batch, 1, query, numbers)`` int64.
    """
    front = ancestors[:, :, :0] if front is None else front
    count = front.shape[2]
    end = (lengths + count)[:, None].expand(ancestors.shape[:2])
    low = torch.zeros_like(end) if begin is None else begin.clamp(min=0)
    numbers = [low + count, end]
    for seen, base in ((front, torch.zeros_like(end)), (ancestors, end)):
        for first in range(0, seen.shape[2], 64):
            word = seen[:, :, first : first + 64].long()
            bits = word << torch.arange(word.shape[2], device=word.device)
            numbers += [base + first, bits.sum(2)]
    return torch.stack(numbers, dim=2)[:, None]


def since(begin: Tensor, keys: Tensor) -> Tensor:
    """Keys that do not come before a query's first one, as in attention to a sliding window or a
    chunk; both are token positions, ``(batch, query)`` and ``(batch, key)``."""
    return keys[:, None, None] >= begin[:, None, :, None]
