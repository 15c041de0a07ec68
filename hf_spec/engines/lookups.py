"""What requests of a serving engine look up: their own text, and that of earlier requests.

Knows tokens and chances; nothing of engines, models or clocks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hf_spec.drafting.ngram import Confidence, Limits, NgramIndex, continuation_chain

#: Stands behind each text of several; no token.
END = -1
#: Tokens of earlier requests that are indexed in one step, so that none has to wait long.
INDEXED = 256


class Chain(NamedTuple):
    """Candidates that follow one another.

    Attributes:
        tokens: of the candidates.
        chances: that a candidate and all before it are right.
    """

    tokens: Sequence[int]
    chances: Sequence[float]


NO_CHAIN = Chain((), ())


class ChainLookup:
    """Finds the likeliest chain in one text, and learns how far such chains can be trusted.

    Args:
        limits: of the look-up.
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
        """What follows in ``text`` where the end of ``tokens`` occurs.

        Args:
            index: of the text.
            text: the tokens themselves, or other texts, each followed by :data:`END`.
            tokens: of the request.
            depth: most candidates.
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
        """Learn from the tokens that came where the last chain was found, once."""
        chain, self._chain = self._chain.tokens, NO_CHAIN
        depth = min(len(chain), len(emitted))
        if not depth:
            return
        accepted = 0
        while accepted < depth and chain[accepted] == emitted[accepted]:
            accepted += 1
        # What a chain says of its first token is weighed by the matches that agree with it.
        if not accepted and emitted[0] in self._first:
            accepted = depth = 1
        self.confidence.observe(self._size, accepted, depth)


class EarlierTexts:
    """The latest tokens of requests that have ended; the oldest half goes when there are too many.

    Args:
        limits: of look-ups.
        capacity: most tokens; 0 keeps none.
    """

    def __init__(self, limits: Limits, capacity: int):
        self.limits = limits
        self.capacity = capacity
        self._waiting: deque[Sequence[int]] = deque()
        self._halves = [self._empty()]
        self._unfinished = False  # whether more of the text that was added last waits

    def _empty(self) -> tuple[array[int], NgramIndex]:
        return array("i"), NgramIndex(self.limits.min_ngram, self.limits.max_ngram)

    def add(self, text: Sequence[int]) -> None:
        """A request has ended."""
        if self.capacity:
            self._waiting.append(text[-(self.capacity // 2) :])

    def index_some(self) -> None:
        """Index what waits, a part in each step."""
        if not self._waiting:
            return
        text, index = self._halves[-1]
        if 2 * len(text) >= self.capacity and not self._unfinished:
            text, index = self._empty()
            self._halves = [self._halves[-1], (text, index)]
        waiting = self._waiting.popleft()
        if self._unfinished:
            text.pop()  # its END
        text.extend(waiting[:INDEXED])
        index.update(text)
        text.append(END)
        self._unfinished = len(waiting) > INDEXED
        if self._unfinished:
            self._waiting.appendleft(waiting[INDEXED:])

    def find(self, lookup: ChainLookup, tokens: Sequence[int], depth: int) -> Chain:
        """The likeliest chain, of the newer half where there is one."""
        for text, index in reversed(self._halves):
            chain = lookup.find(index, text, tokens, depth)
            if chain.tokens:
                return chain
        return NO_CHAIN


class Lookups:
    """Look-ups of one request.

    Args:
        limits: of each.
        priors: what all requests have learned of their own texts, and of earlier ones.
        earlier: texts of earlier requests.
    """

    def __init__(
        self, limits: Limits, priors: tuple[Confidence, Confidence], earlier: EarlierTexts
    ):
        self.index = NgramIndex(limits.min_ngram, limits.max_ngram)
        self.earlier = earlier
        self._own, self._others = (ChainLookup(limits, prior) for prior in priors)

    def find(self, tokens: Sequence[int], depth: int) -> Chain:
        """The chain of the most expected tokens.

        Args:
            tokens: of the request so far; it only grows.
            depth: most candidates.
        """
        self.index.update(tokens)
        chain = self._own.find(self.index, tokens, tokens, depth)
        if not self.earlier.capacity:
            return chain
        other = self.earlier.find(self._others, tokens, depth)
        return max(chain, other, key=lambda one: sum(one.chances))

    def observe(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that came where the last look-up was made, once."""
        self._own.observe(emitted)
        self._others.observe(emitted)
