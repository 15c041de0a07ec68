"""Shrinks the batch as its rows finish, so that forwards do not compute finished rows.

Rows advance at different rates; most of a batch is often done long before its last row. This module
knows which objects follow the batch, but not what a step does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hf_spec.core.buckets import bucket
from hf_spec.decoding.scoring import Processors
from hf_spec.drafting.drafter import DecodeState, Drafter

#: Share of the carried rows that must have finished. There is at most one swap per finished row,
#: and a swap costs about one row's share of a step (docs/inside/exactness.md), so shrinking pays
#: within a step or two. The share is not smaller, as step times are learned per batch size.
SHARE = 1 / 8


class Shrinking:
    """Drops finished rows from one call's batch.

    Args:
        state: the call's state, whose rows are dropped.
        drafter, scorer: follow the batch.
        ends: given rows of the call, 1 for each whose last token must be cached before it leaves.
        halves: shrink only to powers of two, as code is compiled for each size.
    """

    def __init__(
        self, state: DecodeState, drafter: Drafter, scorer: Processors,
        ends: Callable[[Sequence[int]], list[int]], halves: bool = False,
    ):  # fmt: skip
        self.state = state
        self.drafter = drafter
        self.scorer = scorer
        self.ends = ends
        self.halves = halves
        self._allowed: bool | None = None

    def step(self) -> bool:
        """Drop the finished rows if that pays; return whether any were dropped.

        Called between two steps.
        """
        state = self.state
        ends = self.ends(state.rows)
        finished = [n for n, (on, end) in enumerate(zip(state.active, ends)) if not on and not end]
        if self.halves:
            kept = max(state.batch_size - len(finished), 1)
            finished = finished[: max(state.batch_size - bucket(kept), 0)]
        enough = len(finished) >= max(SHARE * state.batch_size, 1)
        if not enough or len(finished) == state.batch_size or not self.allowed:
            return False
        rows = state.cache.park(finished)
        state.select(rows)
        self.scorer.select(rows)
        self.drafter.select(state, rows)
        return True

    @property
    def allowed(self) -> bool:
        """Whether the model may be called with fewer rows; determined once."""
        if self._allowed is None:
            inputs = self.state.target.model_kwargs.values()
            self._allowed = not (
                any(isinstance(value, (list, tuple, dict)) and value for value in inputs)
                or _hooks_know_rows(self.state.model, self.state.batch_size)
            )
        return self._allowed


def _hooks_know_rows(model: Any, batch_size: int) -> bool:
    """Whether a hook gives modules a value per batch row, as PEFT's for ``adapter_names`` do."""
    return any(
        (isinstance(value, (list, tuple)) and len(value) == batch_size)
        or (isinstance(value, Tensor) and value.shape[:1] == (batch_size,))
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, functools.partial)
        for value in hook.keywords.values()
    )
