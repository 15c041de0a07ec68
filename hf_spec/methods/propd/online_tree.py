"""ProPD's dynamic token tree generation (``tree="online"``): section 4.2 of the paper.

While decoding, it counts how often the k likeliest tokens of each distance contain the right one; a
path's probability follows from its ranks (section 4.2.2). The policy chooses the number of
draft tokens, by the step times that it learns (sections 4.2.1 and 4.2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_spec.adapters.module import Adapter
from hf_spec.core.memory import locked, recall
from hf_spec.core.transfer import is_async, to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.drafting.calibration import Array
from hf_spec.drafting.grow import Children, Frontier
from hf_spec.drafting.heads import HeadDrafter
from hf_spec.drafting.predictions import Predictions, reweighed
from hf_spec.drafting.state import DecodeState
from hf_spec.modeling_patches.weights import placement

#: Value of the option ``tree``.
ONLINE = "online"
#: Weight alpha of a new hit, and K, number of ranks that are distinguished, unless options say so.
HIT_ALPHA, RANKS = 1 / 128, 16
#: Number of hits that the initial guess stands for.
GUESSED = 16
#: Steps whose hits are counted at once where the host would wait for each.
COUNTED = 16


class HitRates:
    """P_i^k: how often the right token is among the k likeliest at distance i.

    Args:
        depth: number of distances.
        alpha: least weight of a new hit.
        ranks: K.

    Attributes:
        cumulative: ``(depth, K)`` P, at [i - 1, k - 1].
        counts: ``(depth,)`` hits and misses that it stands for.
    """

    def __init__(self, depth: int, alpha: float = HIT_ALPHA, ranks: int = RANKS):
        self.alpha, self.ranks = alpha, ranks
        # Typical of trained heads: the accuracy of the first rank falls with distance, that of the
        # others hardly (docs/methods/medusa.md).
        first = 0.55 * 0.85 ** np.arange(depth)[:, None]
        others = np.broadcast_to(0.1 / np.arange(1, ranks), (depth, ranks - 1))
        self.cumulative: Array = np.concatenate([first, others], axis=1).cumsum(1).clip(max=1.0)
        self.counts: Array = np.full(depth, GUESSED)
        self._on_device: dict[torch.device, Tensor] = {}

    def observe(self, distance: int, rank: int) -> None:
        """P <- (1 - alpha) P + alpha [the token is among the k likeliest].

        Args:
            distance: from 1.
            rank: of the right token, from 0; K for a miss.
        """
        row, hits = self.cumulative[distance - 1], rank <= np.arange(self.ranks)
        # At first, a plain mean.
        alpha = max(self.alpha, 1 / (self.counts[distance - 1] + 1))
        row += alpha * (hits - row)
        self.counts[distance - 1] += 1

    @property
    def chances(self) -> Array:
        """``(depth, K)`` p_i^k = P_i^k - P_i^(k-1)."""
        return np.diff(self.cumulative, axis=1, prepend=0.0).clip(min=0.0)

    @locked
    def chances_on(self, device: torch.device) -> Tensor:
        """:attr:`chances` on a device, float32, always in the same memory."""
        found = to_device(self.chances.astype(np.float32), device)
        return self._on_device.setdefault(device, found).copy_(found)


class Ranked:
    """Predictions scored by the probabilities ``(depth, K)`` of their ranks."""

    def __init__(self, predictions: Predictions, chances: Tensor):
        self._predictions, self._chances = predictions, chances

    def expand(self, frontier: Frontier) -> Children | None:
        found = self._predictions.expand(frontier)
        if found is None:
            return None
        own, row = found.log_probs, self._chances[frontier.depth, : found.log_probs.shape[-1]]
        order = own.argsort(dim=-1, descending=True, stable=True)
        probs = pad(row, (0, own.shape[-1] - len(row))).to(own.device).log().expand_as(own)
        ranked = torch.empty_like(probs).scatter_(-1, order, probs)
        return Children(found.tokens, ranked.masked_fill(own == -torch.inf, -torch.inf))


class OnlineDrafter(HeadDrafter):
    """Trees of the heads' likeliest ranks.

    Attributes:
        hits: how often predictions are right, by distance; updated.
    """

    weighs = False
    held = (*HeadDrafter.held, "_chances")
    #: Of the trees that have grown last, and of this step's with their root: see :meth:`learn`.
    _made: Sequence[Any] = ()
    _predicted: Sequence[Any] = ()

    def __init__(self, model: Any, options: Any, adapter: Adapter):
        super().__init__(model, options, adapter)
        key = self.distances, options.hit_alpha, options.hit_ranks
        self.hits = recall(model, (HitRates, adapter.name, *key), lambda: HitRates(*key))
        self._chances = self.hits.chances_on(placement(model).device)
        #: Of steps that are not counted yet, the likeliest tokens (batch, depth, K), and what came.
        self._uncounted: list[tuple[Tensor, list[Sequence[int]]]] = []

    def static_states(self, adapter: Adapter) -> None:
        return None

    @property
    def num_kept(self) -> int:
        return 1 if self.markov_head is None else 3

    def kept(self) -> Sequence[Tensor]:
        return self._made

    def levels(self, root: Tensor, depth: int, width: int, noise: Tensor | None = None) -> Any:
        made = super().levels(root, depth, max(width, self.hits.ranks))
        self._made = (made.tokens, made.log_probs, made.states)[: self.num_kept]
        return Ranked(made, self._chances)

    def propose(self, state: DecodeState) -> Tree:
        tree = super().propose(state)
        self._predicted = state.root, *(self._made if state.grown is None else state.grown.kept)
        return tree

    @locked
    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        super().observe(state, tree, result)
        if self._predicted:
            self.learn(result.tokens, *self._predicted)
        self._predicted = ()

    def learn(
        self, emitted: Sequence[Sequence[int]], root: Tensor, tokens: Tensor, *given: Any
    ) -> None:
        """Learn from what each sequence emitted after its root ``(batch,)``.

        Args:
            tokens: what was predicted, see :attr:`Predictions.tokens`.
            given: for a Markov head, the other two arguments of :func:`reweighed`.
        """
        depth = tokens.shape[1]
        if self.markov_head is not None:
            before = [[*row, *[0] * depth][: depth - 1] for row in emitted]
            later = to_device(before, root.device, root.dtype).view(len(emitted), -1)
            previous = torch.cat([root[:, None], later], 1).to(tokens.device)[:, :, None]
            found = reweighed(self.markov_head, previous, tokens, *given)[:, :, 0]
            tokens = tokens.gather(2, found.argsort(stable=True, dim=-1, descending=True))
        came = [row[:depth] for row in emitted]
        self._uncounted.append((tokens[..., : self.hits.ranks], came))
        if len(self._uncounted) >= (COUNTED if is_async(tokens.device) else 1):
            self._count()

    def _count(self) -> None:
        """Count hits and misses, in one transfer."""
        steps, self._uncounted = self._uncounted, []
        if not steps:
            return
        best = iter(torch.cat([order.flatten(0, 1) for order, _ in steps]).tolist())
        for order, came in steps:
            for tokens in came:
                likeliest = list(islice(best, order.shape[1]))
                for distance, (ranks, token) in enumerate(zip(likeliest, tokens), 1):
                    rank = ranks.index(token) if token in ranks else self.hits.ranks
                    self.hits.observe(distance, rank)
        self.hits.chances_on(self._chances.device)

    @locked
    def details(self) -> dict[str, Any]:
        self._count()
        return {"online": {"hits": self.hits.cumulative.tolist()}}
