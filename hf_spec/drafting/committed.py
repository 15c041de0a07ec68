"""The KV cache of a drafter, and the committed tokens that it has yet to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.transfer import sent
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult, StepResult
from hf_spec.drafting.drafter import Drafter
from hf_spec.drafting.state import DecodeState
from hf_spec.model.hidden_states import states_at


class DraftCache(TreeCache):
    """A :class:`TreeCache` whose rows may grow by numbers that are on the device only.

    From :meth:`commit_ahead` to :meth:`settle`, ``host_lengths`` are upper bounds.
    """

    _settled: list[int] | None = None  # lengths that the host knows, if not all of them

    @property
    def is_uniform(self) -> bool:
        return self._settled is None and super().is_uniform

    def commit_ahead(self, counts: Tensor, most: int) -> None:
        """Close the block and keep the first ``counts`` (batch,) nodes of each row, of which none
        keeps more than ``most``. Only for caches without recurrent layers."""
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


class Rows(NamedTuple):
    """Committed tokens of each sequence, in order.

    Attributes:
        tokens: ``(batch, n)`` int64, the token *after* each of them.
        hidden: ``(batch, n, features)`` the target's states of each of them.
        counts: how many of the n there are; values behind them are arbitrary.
        exact: the same as ``(batch,)`` if ``counts`` are but upper bounds, as the host does not
            know them yet.
    """

    tokens: Tensor
    hidden: Tensor
    counts: list[int]
    exact: Tensor | None = None


class ReadsCommitted(Drafter):
    """A drafter that runs committed tokens in a cache of its own. What steps commit is collected
    until then, which plain steps put off."""

    cache: DraftCache  # from the call's first step

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._counts: list[Tensor | list[int]] = []
        self._before: list[int] | None = None  # what was taken ahead, but of the latest step

    def advance(self, result: StepResult, hidden: Tensor | None) -> None:
        if hidden is None:
            return
        width = min(hidden.shape[1], result.tokens.shape[1])
        tokens = result.tokens[:, :width].to(hidden.device).clamp(min=0)
        self._parts.append((tokens, hidden[:, :width]))
        self._counts.append(result.counts)

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        super().observe(state, tree, result)
        # These counts replace those of the latest step, or what the cache has of them.
        counts, before = [len(path) for path in result.path], self._before
        self._before = None
        if before is None:
            self._counts[-1] = counts
        else:
            self.cache.settle(list(map(sum, zip(before, counts))))

    def take_committed(self, ahead: bool = False) -> Rows | None:
        """All that was committed since it was last taken; None if there is nothing. If it is taken
        ahead, the host does not know the latest counts yet, and does not ask for them."""
        parts, self._parts = self._parts, []
        counts, self._counts = self._counts, []
        if not parts:
            return None
        # A prompt's, which comes alone, is long: it is not copied.
        tokens, hidden = parts[0]
        if len(parts) > 1:
            tokens, hidden = (torch.cat(column, dim=1) for column in zip(*parts))
        exact = sent(counts[-1], tokens.device) if ahead else None
        if ahead:
            counts[-1] = [parts[-1][0].shape[1]] * len(tokens)
        known = [one if isinstance(one, list) else one.tolist() for one in counts]
        if exact is not None:
            self._before = [sum(row) for row in zip([0] * len(tokens), *known[:-1])]
            exact = exact + sent(self._before, tokens.device)
        if len(parts) == 1:
            return Rows(tokens, hidden, known[0], exact)
        rows: list[list[int]] = [[] for _ in known[0]]
        start = 0
        for (part, _), of_rows in zip(parts, known):
            for row, count in zip(rows, of_rows):
                row += range(start, start + count)
            start += part.shape[1]
        most = max(map(len, rows))
        places = sent([row + [0] * (most - len(row)) for row in rows], tokens.device)
        found = tokens.gather(1, places), states_at(hidden, places)
        return Rows(*found, list(map(len, rows)), exact)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.cache.select(rows)
        for place, (tokens, hidden) in enumerate(self._parts):
            index = sent(rows, tokens.device)
            self._parts[place] = tokens[index], hidden[index]
        for place, counts in enumerate(self._counts):
            if isinstance(counts, list):
                self._counts[place] = [counts[row] for row in rows]
            else:
                self._counts[place] = counts[sent(rows, counts.device)]
