"""What a drafter expects of the next tokens: the likeliest at each distance, and their chances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_spec.core.tree import TokenTree
from hf_spec.drafting.transition import Transition

#: Tokens of each distance that a transition weighs.
SHORTLIST = 32


class Predictions:
    """The likeliest tokens at each distance behind the root.

    Where there is a transition, it weighs the tokens of this shortlist anew, given the token
    before; all others together keep the chance that they have without it.

    Args:
        logits: ``(batch, distances, vocab)``; distance 1 is that of the root's children.
        width: tokens to keep for each distance, with a transition at least `SHORTLIST`; all of a
            smaller vocabulary.
        known: distances that each row has predictions for; the others' are any. As a tensor,
            ``(batch,)``, where the host is not to know.
        transition: how the token before changes them.
        states: ``(batch, distances, hidden)`` from which the logits were made; for the transition.
        ids: ``(vocab,)`` the tokens that these logits are of; None: their places are their ids.

    Attributes:
        tokens: ``(batch, distances, width)`` ids, the likeliest first.
        log_probs: ``(batch, distances, width)`` float32, whatever the token before.
        known: see above.
    """

    def __init__(
        self,
        logits: Tensor,
        width: int,
        known: Sequence[int] | Tensor,
        transition: Transition | None = None,
        states: Tensor | None = None,
        ids: Tensor | None = None,
    ):
        if transition is not None:
            width = max(width, SHORTLIST)
        best = logits.topk(min(width, logits.shape[-1]), dim=-1)
        precise = torch.promote_types(logits.dtype, torch.float32)
        total = logits.to(precise).logsumexp(-1, keepdim=True)
        self.tokens = best.indices if ids is None else ids[best.indices]
        log_probs = best.values - total
        # All tokens alike where numbers have overflown on the way: a draft may come from any.
        alike = -math.log(logits.shape[-1])
        self.log_probs = log_probs.masked_fill(log_probs.isnan(), alike)
        self.known: Any = known if isinstance(known, Tensor) else tuple(known)
        self._transition, self._states = transition, states

    @property
    def distances(self) -> int:
        return self.tokens.shape[1]

    def given(self, previous: Tensor) -> Tensor:
        """Log-probabilities of :attr:`tokens`.

        Args:
            previous: ``(batch, distances, n)`` tokens before each distance.

        Returns:
            ``(batch, distances, n, width)``; or ``(batch, distances, 1, width)`` where the token
            before does not matter.
        """
        plain = self.log_probs[:, :, None]
        if self._transition is None:
            return plain
        assert self._states is not None
        bias = self._transition.bias(previous.to(self.tokens.device), self._states, self.tokens)
        weighed = plain + bias
        # What is left for all other tokens, whatever the token before.
        rest = torch.log1p(-plain.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
        found = weighed - torch.logaddexp(weighed.logsumexp(-1, keepdim=True), rest)
        return torch.where(found.isnan(), plain, found)

    def after(self, root: Tensor) -> Tensor:
        """:meth:`given` each token that may stand before: at distance 1 the root, and then those
        of :attr:`tokens` one distance before, in their order.

        Args:
            root: ``(batch,)``
        """
        if self._transition is None:
            return self.log_probs[:, :, None]
        first = root.to(self.tokens.device)[:, None, None].expand(-1, 1, self.tokens.shape[-1])
        return self.given(torch.cat([first, self.tokens[:, :-1]], dim=1))

    def ranked(self, trees: Sequence[TokenTree], root: Tensor) -> Tensor:
        """Tokens on the nodes of given trees: a node of rank r carries the r-th likeliest token.

        Args:
            trees: of each row; no deeper than there are distances, and with ranks below the width.
            root: ``(batch,)``

        Returns:
            ``(batch, nodes)`` int64; any tokens on the padding of smaller trees.
        """
        key, device = tuple(trees), str(self.tokens.device)
        if self._transition is None:
            places = _places(key, self.tokens.shape[-1], device)
        else:
            # Of each token before, the order of those that follow; then down the trees' levels.
            order = self.after(root).argsort(stable=True, dim=-1, descending=True)
            width = order.shape[-1]
            order, (parents, depths, ranks) = order.flatten(1), _levels(key, device)
            level, place = (depths - 1).clamp(min=0), torch.zeros_like(parents)
            for distance in range(1, max(tree.max_depth for tree in trees) + 1):
                at = (level * width + place.gather(1, parents)) * width + ranks
                place = torch.where(depths == distance, order.gather(1, at), place)
            places = (level * width + place)[:, 1:]
        chosen = self.tokens.flatten(1).gather(1, places)
        return torch.cat([root[:, None], chosen.to(root.device)], dim=1)

    def likeliest(self, previous: Tensor) -> Tensor:
        """``(batch, distances, width)`` ids, the likeliest first, given the tokens before.

        Args:
            previous: ``(batch, distances)`` the token before each distance.
        """
        if self._transition is None:
            return self.tokens
        order = self.given(previous[:, :, None])[:, :, 0].argsort(
            stable=True, dim=-1, descending=True
        )
        return self.tokens.gather(2, order)


def distribution(scores: Tensor) -> Tensor:
    """Softmax of a draft's scores ``(..., vocab)``, to be sampled from.

    All tokens alike where numbers have overflown on the way: a draft may come from any.
    """
    return scores.softmax(-1).nan_to_num(1 / scores.shape[-1])


@lru_cache(maxsize=1024)
def _places(trees: tuple[TokenTree, ...], width: int, device: str) -> Tensor:
    """Where the token of each candidate stands among ``width`` tokens per depth: (batch, nodes)."""
    most = max(map(len, trees)) - 1
    rows = []
    for tree in trees:
        row = [(d - 1) * width + r for d, r in zip(tree.depths[1:], tree.ranks[1:])]
        rows.append(row + [0] * (most - len(row)))
    return torch.tensor(rows, device=device)


@lru_cache(maxsize=1024)
def _levels(trees: tuple[TokenTree, ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, depths and ranks of the nodes of each row, ``(batch, nodes)``; padding has 0."""
    most = max(map(len, trees))
    found = []
    for name in ("parents", "depths", "ranks"):
        rows = [[max(n, 0) for n in getattr(tree, name)] for tree in trees]
        found.append([row + [0] * (most - len(row)) for row in rows])
    parents, depths, ranks = torch.tensor(found, device=device)
    return parents, depths, ranks
