"""Decides when a batch shrinks, so that forwards do not compute finished rows.

Rows advance at different rates; most of a batch is often done long before its last row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_spec.core.buckets import bucket

#: Share of the batch's rows that must have finished. At most one row is moved per finished row, at
#: about one row's share of a step (docs/inside/exactness.md), so shrinking pays off within a step
#: or two. The share is not smaller, as step times are learned per batch size.
SHARE = 1 / 8


def remaining_rows(active: Sequence[bool], powers_of_two: bool = False) -> list[int] | None:
    """The rows that a batch keeps, in their new order; None if it does not shrink.

    The last rows take the places of finished ones, so that few rows move.

    Args:
        active: unfinished rows.
        powers_of_two: shrink only to such sizes, as code is compiled for each size.
    """
    size, left = len(active), sum(active)
    if powers_of_two:
        left = min(bucket(left), size)
    if not 0 < left <= size - max(SHARE * size, 1):
        return None
    rows = list(range(left))
    behind = [row for row in range(left, size) if active[row]]
    for row in range(left):
        if not active[row] and behind:
            rows[row] = behind.pop()
    return rows


def may_shrink(model: Any, model_kwargs: dict[str, Any], batch_size: int) -> bool:
    """Whether a model, with these arguments of its forwards, may be called with fewer rows."""
    if any(isinstance(one, (list, tuple, dict)) and one for one in model_kwargs.values()):
        return False
    # Hooks may have a value per batch row, as PEFT's for ``adapter_names`` do.
    return not any(
        (isinstance(value, (list, tuple)) and len(value) == batch_size)
        or (isinstance(value, Tensor) and value.shape[:1] == (batch_size,))
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, functools.partial)
        for value in hook.keywords.values()
    )
