"""The KV cache of a drafter, which keeps tokens before the host knows how many."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_spec.cache.tree_cache import TreeCache


class DraftCache(TreeCache):
    """A :class:`TreeCache` whose rows may grow by numbers that are on the device only.

    From :meth:`commit_ahead` to :meth:`settle`, ``host_lengths`` are upper bounds.
    """

    _settled: list[int] | None = None  # lengths that the host knows, if not all of them

    @property
    def is_uniform(self) -> bool:
        return self._settled is None and super().is_uniform

    def commit_ahead(self, counts: Tensor, most: int) -> None:
        """Close the block and keep the first nodes of each row.

        Only for caches without recurrent layers.

        Args:
            counts: ``(batch,)`` nodes of each row.
            most: no row keeps more.
        """
        assert self.recurrent is None
        if self.states.is_empty:
            self.states.join()
        self._settled = self._settled or self.host_lengths
        self.block = None
        self.host_lengths = [length + most for length in self.host_lengths]
        self.lengths = self.lengths + counts.to(self.lengths.device)

    def settle(self, counts: Sequence[int]) -> None:
        """Tell how many nodes each row keeps of those that :meth:`commit_ahead` has kept."""
        assert self._settled is not None
        lengths, self._settled = self._settled, None
        self.set_lengths([length + count for length, count in zip(lengths, counts)])
