"""The KV cache of a drafter that runs committed tokens itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult


class DraftCache(TreeCache):
    """A :class:`TreeCache` whose owner asks for no more than what recorded code can know, too."""

    def open(self, tree: Tree, first: int = 0) -> tuple[int, Tensor]:
        """Open a block for the nodes ``first ..`` of a tree, whose states are written next.

        Returns:
            The number of slots that attention sees; ``(batch, n)`` positions of these nodes.
        """
        return self.begin(tree, first), self.lengths[:, None] + tree.depths[:, first:]

    def keep(self, counts: Tensor, known: Sequence[int] | None) -> None:
        """Close the block and keep the first ``counts`` (batch,) nodes of each row, which are those
        that are ``known``, if the host knows them."""
        self.commit(counts.tolist() if known is None else known)


class TracedDraftCache:
    """The same as recorded code sees it: lengths are on the device only, and all slots are seen.

    Args:
        cache: holds the states.
        tensors: what stands for its tensors, and its lengths.
        in_place: see :meth:`TreeCache.traced_with`.
    """

    def __init__(self, cache: DraftCache, tensors: Sequence[Tensor], in_place: bool):
        self._cache, self._in_place = cache, in_place
        *self._tensors, self.lengths = tensors
        self._block: Any = None

    def open(self, tree: Tree, first: int = 0) -> tuple[int, Tensor]:
        """See :meth:`DraftCache.open`."""
        lengths, cache = self.lengths, self._cache
        nodes = first + torch.arange(tree.num_nodes - first, device=lengths.device)
        slots = lengths[:, None] + nodes
        self._block = cache.traced_with(self._tensors, lengths, slots, tree, self._in_place)
        return cache.capacity, lengths[:, None] + tree.depths[:, first:]

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._block.update(*args, **kwargs)
        return found

    def keep(self, counts: Tensor, known: Sequence[int] | None) -> None:
        """See :meth:`DraftCache.keep`."""
        self.lengths = self.lengths + counts.to(self.lengths.device)

    def rollback(self) -> None:
        """Nothing is left open."""


def whole(tokens: Tensor) -> StepResult:
    """A sequence as a result, given the tokens ``(1, n)`` after each of its own."""
    counts, path = tokens.new_full((1,), tokens.shape[1]), torch.zeros_like(tokens)
    host = HostResult([range(tokens.shape[1])], tokens.tolist(), [0])
    return StepResult(path, counts, tokens, counts * 0, counts - 1, tokens[:, -1], host)


def committed(result: StepResult, hidden: Tensor) -> Tensor:
    """``(batch, n)`` int64 tokens after each committed one, whose states ``(batch, n, features)``
    are there; the first ``result.counts`` of each row count."""
    width = min(hidden.shape[1], result.tokens.shape[1])
    return result.tokens[:, :width].to(hidden.device).clamp(min=0)
