"""Trees by accuracies that are learned while decoding (``tree="online"``): ProPD, section 4.2.2.

While decoding, it counts how often the k likeliest tokens of each distance contain the right one;
a path's probability follows from its ranks. The policy chooses the number of candidates, by the
step times that it learns (sections 4.2.1 and 4.2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_spec.core.memory import locked
from hf_spec.drafting.grow import Children, Frontier
from hf_spec.drafting.predictions import Predictions
from hf_spec.drafting.state import DecodeState
from hf_spec.drafting.tree_drafter import TreeDrafter
from hf_spec.policy.adaptive_trees import AdaptiveTrees
from hf_spec.policy.likely_paths import Array

#: alpha of the hits. The first hits weigh more, as in a plain mean.
HIT_ALPHA = 1 / 128
#: Number of hits that the initial guess, and that previously measured accuracies, stand for.
GUESSED, MEASURED = 16, 64
#: K, number of ranks that are distinguished.
RANKS = 16
#: Rank of an unknown token. Ranks from K on are misses.
UNKNOWN = -1


class HitRates:
    """P_i^k: how often the right token is among the k likeliest at distance i (section 4.2.2).

    Args:
        depth: distances.
        ranks: K.

    Attributes:
        cumulative: ``(depth, K)`` P, at [i - 1, k - 1].
        counts: ``(depth,)`` hits and misses that it stands for.
    """

    def __init__(self, depth: int, ranks: int = RANKS):
        # Typical of trained heads and probes: the accuracy of the first rank falls with distance,
        # that of the others hardly (docs/methods/medusa.md).
        first = np.broadcast_to(0.55 * 0.85 ** np.arange(depth)[:, None], (depth, 1))
        others = np.broadcast_to(0.1 / np.arange(1, ranks), (depth, ranks - 1))
        guess = np.concatenate([first, others], axis=1)
        self.cumulative: Array = guess.cumsum(1)
        self.counts: Array = np.full(depth, GUESSED)

    @classmethod
    def measured(cls, accuracies: Array, depth: int, ranks: int = RANKS) -> HitRates:
        """Create from measured p, ``(distances, ranks)``; missing distances are guessed."""
        rates = cls(depth, ranks)
        table = accuracies[:depth, :ranks]
        table = np.pad(table, [(0, 0), (0, ranks - table.shape[1])])
        rates.cumulative[: len(table)] = table.cumsum(1)
        rates.counts[: len(table)] = MEASURED
        return rates

    def observe(self, ranks: Array) -> None:
        """P <- (1 - alpha) P + alpha [the token is among the k likeliest], one after the other.

        Args:
            ranks: ``(n, depth)`` rank of the right token in each prediction, in order of time: from
                0, K for a miss, ``UNKNOWN`` where the token is not known.
        """
        depth, width = self.cumulative.shape
        for i in range(depth):
            known = ranks[ranks[:, i] != UNKNOWN, i]
            if not len(known):
                continue
            alpha = np.maximum(HIT_ALPHA, 1 / (self.counts[i] + 1 + np.arange(len(known))))
            kept = np.cumprod((1 - alpha)[::-1])[::-1]  # of what was known before each
            weights = alpha * np.append(kept[1:], 1.0)
            hits = known[:, None] <= np.arange(width)  # (n, K)
            self.cumulative[i] = kept[0] * self.cumulative[i] + weights @ hits
            self.counts[i] += len(known)

    @property
    def chances(self) -> Array:
        """``(depth, K)`` p_i^k = P_i^k - P_i^(k-1)."""
        return np.diff(self.cumulative, axis=1, prepend=0.0).clip(min=0.0)


class Ranked:
    """Predictions scored by the probabilities of their ranks.

    Args:
        predictions: what ranks tokens.
        chances: ``(depth, K)`` of each rank at each distance.
    """

    def __init__(self, predictions: Predictions, chances: Array):
        self._predictions = predictions
        self._chances = chances
        self.tokens, self.known = predictions.tokens, predictions.known
        self.distances = predictions.distances

    def expand(self, frontier: Frontier) -> Children | None:
        """See :class:`hf_spec.drafting.grow.Expands`."""
        found = self._predictions.expand(frontier)
        if found is None:
            return None
        own = found.log_probs
        row = np.zeros(own.shape[-1], np.float32)
        ranks = min(len(row), self._chances.shape[1])
        row[:ranks] = self._chances[frontier.depth, :ranks]
        order = own.argsort(dim=-1, descending=True, stable=True)
        probs = torch.from_numpy(row).to(own.device).log().expand_as(own)
        ranked = torch.empty_like(probs).scatter_(-1, order, probs)
        return Children(found.tokens, ranked.masked_fill(own == -torch.inf, -torch.inf))


class OnlineTrees(AdaptiveTrees):
    """Trees of the likeliest ranks.

    Args:
        depth: distances that are predicted.
        probes: whether predictions come from probes under the nodes.
        hits: how often predictions are right; updated.
    """

    weighs: ClassVar[bool] = False
    on_device: ClassVar[bool] = False

    def __init__(self, depth: int, probes: bool, hits: HitRates):
        super().__init__(depth, probes)
        self.hits = hits
        self._predicted: tuple[Predictions, Tensor] | None = None

    @locked
    def predictions(
        self, drafter: TreeDrafter, state: DecodeState, depth: int, width: int,
        known: Sequence[int] | Tensor, noise: Tensor | None,
    ) -> Any:  # fmt: skip
        made = drafter.predict(state, depth, max(width, RANKS), known)
        self._predicted = made, state.root
        return Ranked(made, self.hits.chances)

    @locked
    def observe(self, emitted: Sequence[Sequence[int]], num_drafted: int) -> None:
        super().observe(emitted, num_drafted)
        came = emitted
        if self._predicted is None:
            return
        (made, root), self._predicted = self._predicted, None
        depth = made.distances
        before = [[*tokens, *[0] * depth][: depth - 1] for tokens in came]
        later = torch.tensor(before, dtype=root.dtype, device=root.device).view(len(came), -1)
        order = made.likeliest(torch.cat([root[:, None], later], 1).to(made.tokens.device))
        best = order[..., :RANKS].tolist()
        self.hits.observe(
            np.array([
                [
                    _rank(best[row][d], tokens[d])
                    if d < min(len(tokens), depth, made.known[row]) else UNKNOWN
                    for d in range(self.depth)
                ]
                for row, tokens in enumerate(came)
            ])
        )  # fmt: skip

    def details(self) -> dict[str, Any]:
        return {"online": {"hits": self.hits.cumulative.tolist()}}


def _rank(best: Sequence[int], token: int) -> int:
    """From 0; `RANKS` for a miss."""
    return best.index(token) if token in best else RANKS
