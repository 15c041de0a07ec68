"""A drafter's predictions: the likeliest tokens at each distance and their probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_spec.core.device import to_device
from hf_spec.core.shapes import TokenTree
from hf_spec.core.tree import filled
from hf_spec.draft.grow import Children, Frontier
from hf_spec.predict.markov import MarkovHead
from hf_spec.target.hidden_states import gather_hidden
from hf_spec.target.noise import TRUST, as_sampled

#: Tokens per distance that a Markov head rescores.
SHORTLIST = 32


class Predictions:
    """The likeliest tokens at each distance after the root.

    A Markov head rescores this shortlist given the previous token; all other tokens together keep
    their probability without it.

    Args:
        logits: ``(batch, distances, vocab)``; distance 1 is that of the root's children.
        width: tokens to keep per distance, at least `SHORTLIST` with a Markov head; all tokens of a
            smaller vocabulary.
        known: distances that each row has predictions for; others are arbitrary. A tensor
            ``(batch,)`` if the host does not know them yet.
        markov_head: how the previous token changes the predictions.
        states: ``(batch, distances, hidden)`` that give the logits; for the Markov head.
        ids: ``(vocab,)`` token ids of the logits; None if these are the indices.
        noise: ``(batch, distances, vocab)`` that the tokens will be sampled with, see
            :func:`as_sampled`; None if they are not sampled.

    Attributes:
        tokens: ``(batch, distances, width)`` ids, likeliest first.
        log_probs: ``(batch, distances, width)`` float32, independent of the previous token.
        states: the argument.
    """

    def __init__(
        self, logits: Tensor, width: int, known: Sequence[int] | Tensor,
        markov_head: MarkovHead | None = None, states: Tensor | None = None,
        ids: Tensor | None = None, noise: Tensor | None = None,
    ):  # fmt: skip
        self.distances, self.device = logits.shape[1], logits.device
        self.known: Any = known if isinstance(known, Tensor) else tuple(known)
        self._head: Any = markov_head
        self.states, self._ids = states, ids
        self._noise = None if noise is None else noise.to(logits.device)
        scores = logits if self._noise is None else as_sampled(logits, self._noise)
        self._choose(logits, scores, width)

    def _choose(self, logits: Tensor, scores: Tensor, width: int) -> None:
        """Choose tokens; ``scores`` are the logits, or what sampling makes of them."""
        width = width if self._head is None else max(width, SHORTLIST)
        chosen, self.log_probs = likeliest(scores, width)
        self.tokens = self._named(chosen)
        #: :meth:`given` each possible previous token: a tree's root at distance 1,
        #: and :attr:`tokens` of the previous distance, in order, at the others.
        self._table: Tensor | None = None

    def _named(self, tokens: Tensor) -> Tensor:
        """The ids of tokens given as indices of logits."""
        return tokens if self._ids is None else self._ids[tokens]

    def expand(self, frontier: Frontier) -> Children | None:
        """See :class:`hf_spec.draft.grow.Expands`. In rows without predictions of that distance,
        no token has a probability."""
        place, device = frontier.depth, self.tokens.device
        if place >= self.distances:
            return None
        given = self.log_probs[:, place, None]
        if self._head is not None:
            if self._table is None:  # all distances at once: one product instead of many
                root = frontier.tokens[:, :1, None].to(device).expand(-1, 1, given.shape[-1])
                self._table = self.given(torch.cat([root, self.tokens[:, :-1]], dim=1))
            chosen = frontier.choices.to(device)[:, :, None].expand(-1, -1, given.shape[-1])
            given = self._table[:, place].gather(1, chosen)
        return Children(self.tokens[:, place, None], self.where_known(given, place))

    def where_known(self, log_probs: Tensor, place: int) -> Tensor:
        """Log-probabilities ``(batch, nodes, width)`` of a distance, counted from 0; -inf in rows
        without predictions of it."""
        if isinstance(self.known, Tensor) or min(self.known) <= place:
            known = to_device(self.known, log_probs.device)[:, None, None]
            log_probs = log_probs.masked_fill(known <= place, -torch.inf)
        return log_probs

    def given(self, previous: Tensor) -> Tensor:
        """Log-probabilities ``(batch, distances, n, width)`` of :attr:`tokens` by the Markov head.

        Args:
            previous: ``(batch, distances, n)`` tokens before each distance.
        """
        assert self.states is not None
        trust = 1.0 if self._noise is None else TRUST
        return reweighed(self._head, previous, self.tokens, self.log_probs, self.states, trust)

    def ranked(self, shapes: Sequence[Tensor], deepest: int, root: Tensor) -> Tensor:
        """Tokens of the nodes of given trees: a node of rank r gets the r-th likeliest token.

        Args:
            shapes: the tree of each row, see :func:`levels`; with ranks below the width.
            deepest: depth of the deepest node, at most the number of distances.
            root: ``(batch,)``

        Returns:
            ``(batch, nodes)`` int64; arbitrary tokens on the padding of smaller trees.
        """
        parents, depths, ranks = shapes
        tokens = root.to(self.device)[:, None].expand(parents.shape)
        choices, paths = torch.zeros_like(parents), torch.zeros(parents.shape, device=self.device)
        for depth in range(deepest):  # level by level, of all nodes
            found = self.expand(Frontier(depth, tokens, paths, choices, parents))
            assert found is not None
            order = found.log_probs.argsort(stable=True, dim=-1, descending=True)
            order = order.expand(-1, parents.shape[1], -1)  # of all nodes, where they are alike
            chosen = gather_hidden(order, parents).gather(2, ranks[:, :, None])
            after = gather_hidden(found.tokens.expand(order.shape), parents).gather(2, chosen)
            here = depths == depth + 1
            tokens = torch.where(here, after[:, :, 0], tokens)
            choices = torch.where(here, chosen[:, :, 0], choices)
        return tokens.to(root.device)


def reweighed(
    head: Any, previous: Tensor, tokens: Tensor, log_probs: Tensor, states: Tensor,
    trust: float = 1.0,
) -> Tensor:  # fmt: skip
    """:meth:`Predictions.given`, whose attributes the other arguments are; ``trust``: weight of
    what the Markov head says."""
    plain = log_probs[:, :, None]
    bias = head.bias(previous.to(tokens.device), states, tokens)
    weighed = plain + (bias if trust == 1 else trust * bias)
    # Probability of all other tokens, independent of the previous one.
    rest = torch.log1p(-plain.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    found = weighed - torch.logaddexp(weighed.logsumexp(-1, keepdim=True), rest)
    return torch.where(found.isnan(), plain, found)


def distribution(scores: Tensor) -> Tensor:
    """Softmax of a draft's scores ``(..., vocab)``, to sample draft tokens from.

    Uniform where values have overflowed: any draft distribution is valid.
    """
    return scores.softmax(-1).nan_to_num(1 / scores.shape[-1])


def likeliest(logits: Tensor, width: int, others: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Indices of the ``width`` largest of logits ``(..., vocab)``, or all, largest first, and their
    log-probabilities, in float32 at least. ``others``, ``(..., 1)``, is the logarithm of the sum of
    the exponentials of further logits.

    Uniform where values have overflowed: any draft distribution is valid.
    """
    best = logits.topk(min(width, logits.shape[-1]), dim=-1)
    precise = torch.promote_types(logits.dtype, torch.float32)
    total = logits.to(precise).logsumexp(-1, keepdim=True)
    log_probs = best.values - (total if others is None else torch.logaddexp(total, others))
    alike = -math.log(logits.shape[-1])
    return best.indices, log_probs.masked_fill(log_probs.isnan(), alike)


@lru_cache(maxsize=1024)
def levels(trees: tuple[TokenTree, ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, depths and ranks of the nodes of trees, ``(trees, nodes)``; padding has 0."""
    parents, depths, ranks = (
        filled([[max(n, 0) for n in getattr(tree, name)] for tree in trees])
        for name in ("parents", "depths", "ranks")
    )
    return to_device(parents, device), to_device(depths, device), to_device(ranks, device)
