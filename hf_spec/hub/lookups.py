"""Prompt lookup for requests of a serving engine, in their own text and in earlier ones.

This module knows tokens and probabilities, but no engines, models or clocks.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from hf_spec.drafting.ngram import Confidence, Limits, NgramIndex, continuation_chain

#: Marks the end of each of several texts; not a token id.
END = -1


class Chain(NamedTuple):
    """Draft tokens that follow one another.

    Attributes:
        tokens: the draft tokens.
        probabilities: that each draft token and all before it are accepted.
    """

    tokens: Sequence[int]
    probabilities: Sequence[float]


NO_CHAIN = Chain((), ())


class ChainLookup:
    """Finds the likeliest chain in one text, and learns how far such chains can be trusted.

    Args:
        limits: of the lookup.
        prior: what other requests have learned of such a text.
    """

    def __init__(self, limits: Limits, prior: Confidence):
        self.limits = limits
        self.confidence = Confidence(prior)
        self._chain = NO_CHAIN
        self._size = 0
        self._first: set[int] = set()

    def find(
        self, index: NgramIndex, text: Sequence[int], tokens: Sequence[int], depth: int
    ) -> Chain:
        """The continuation in ``text`` of the end of ``tokens``.

        Args:
            index: index of the text.
            text: ``tokens`` themselves, or other texts, each followed by :data:`END`.
            tokens: tokens of the request.
            depth: largest number of draft tokens.
        """
        limits = self.limits
        matches = index.matches(tokens, limits.max_matches, same=text is tokens)
        self._chain = Chain(
            *continuation_chain(text, matches, depth, self.confidence, limits.min_probability)
        )
        self._size = matches[0][1] if matches else 0
        self._first = {text[end] for end, _ in matches}
        return self._chain

    def observe(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that followed where the last chain was found, once."""
        drafted, self._chain = self._chain.tokens, NO_CHAIN
        depth = min(len(drafted), len(emitted))
        if not depth:
            return
        equal = (a == b for a, b in zip(drafted, emitted))
        accepted = sum(itertools.takewhile(bool, equal))
        # The first token's probability is weighted by the matches that agree with it.
        if not accepted and emitted[0] in self._first:
            accepted = depth = 1
        self.confidence.observe(self._size, accepted, depth)


class EarlierTexts:
    """The latest tokens of ended requests; drops the older half when there are too many.

    Args:
        limits: limits of the lookup.
        capacity: largest number of tokens; 0 keeps none.
    """

    def __init__(self, limits: Limits, capacity: int):
        self.limits = limits
        self.capacity = capacity
        self._halves = [self._empty()]

    def _empty(self) -> tuple[array[int], NgramIndex]:
        return array("i"), NgramIndex(self.limits.min_ngram, self.limits.max_ngram)

    def add(self, text: Sequence[int]) -> None:
        """Add the text of a request that has ended."""
        if not self.capacity:
            return
        if 2 * len(self._halves[-1][0]) >= self.capacity:
            self._halves = [self._halves[-1], self._empty()]
        half, index = self._halves[-1]
        half.extend(text[-(self.capacity // 2) :])
        half.append(END)
        index.update(half)

    def find(self, lookup: ChainLookup, tokens: Sequence[int], depth: int) -> Chain:
        """The likeliest chain, from the newer half if it has one."""
        for text, index in reversed(self._halves):
            chain = lookup.find(index, text, tokens, depth)
            if chain.tokens:
                return chain
        return NO_CHAIN


class Lookups:
    """Prompt lookup of one request.

    Args:
        limits: limits of each lookup.
        priors: what all requests have learned about their own texts, and about earlier ones.
        earlier: texts of earlier requests.
    """

    def __init__(
        self, limits: Limits, priors: tuple[Confidence, Confidence], earlier: EarlierTexts
    ):
        self.index = NgramIndex(limits.min_ngram, limits.max_ngram)
        self.earlier = earlier
        self._own, self._others = (ChainLookup(limits, prior) for prior in priors)

    def find(self, tokens: Sequence[int], depth: int) -> Chain:
        """The chain with the largest expected number of accepted tokens.

        Args:
            tokens: tokens of the request so far; they only grow.
            depth: largest number of draft tokens.
        """
        self.index.update(tokens)
        chain = self._own.find(self.index, tokens, tokens, depth)
        if not self.earlier.capacity:
            return chain
        other = self.earlier.find(self._others, tokens, depth)
        return max(chain, other, key=lambda chain: sum(chain.probabilities))

    def observe(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that followed the last lookup, once."""
        self._own.observe(emitted)
        self._others.observe(emitted)
