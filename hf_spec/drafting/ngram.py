"""N-gram lookup: earlier occurrences of a sequence's end, and what followed them.

Each new token is indexed once per n-gram size. The cost of a lookup depends on its result, not on
the length of the sequence. Plain lists and dictionaries are fast enough for short sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_spec.core.checks import AUTO, count, count_or_auto, number, setting
from hf_spec.core.host_tree import Row
from hf_spec.core.limits import MAX_DRAFT_TOKENS, MAX_SIZE

#: Factor on a match's weight per token of its n-gram.
WEIGHT_PER_NGRAM = 4.0
#: Most draft tokens of a lookup by default.
MOST_LOOKED_UP = 15
#: Follows each text of another source, and is no token.
END = -1
_COUNT = count(1, MAX_DRAFT_TOKENS)


class Match(NamedTuple):
    """An earlier occurrence of a sequence's end.

    Attributes:
        end: where it ends: the index of the token that followed.
        size: length of the n-gram.
        source: the tokens in which it was found, texts between which there is an `END`; None for
            the sequence itself.
    """

    end: int
    size: int
    source: Sequence[int] | None = None


class NgramIndex:
    """Index of the positions where each n-gram of a sequence ends, of the given sizes."""

    def __init__(self, min_ngram: int, max_ngram: int):
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        #: By size: where each n-gram ended last, and where the one before that ends at each place
        #: (from ``size`` on) did, 0 for nowhere. No list for each n-gram, as most occur once.
        self._last: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in self.sizes}
        self._before: dict[int, list[int]] = {size: [] for size in self.sizes}
        self._indexed = 0

    def update(self, tokens: Sequence[int]) -> None:
        """Index the n-grams of ``tokens`` that are new since the last call."""
        for size in self.sizes:
            last, before = self._last[size], self._before[size]
            first = max(self._indexed + 1, size)
            shifted = (tokens[first - size + place :] for place in range(size))
            for end, ngram in enumerate(zip(*shifted), first):
                before.append(last.get(ngram, 0))
                last[ngram] = end
        self._indexed = len(tokens)

    def matches(
        self, tokens: Sequence[int], limit: int, source: Sequence[int] | None = None,
        sizes: range | None = None, since: int = 0,
    ) -> list[Match]:  # fmt: skip
        """Earlier occurrences of the sequence's end, longest n-gram first.

        Among equal sizes the latest comes first; each position occurs once, with its longest match.

        Args:
            source: the indexed tokens; None if they are the sequence.
            sizes: of the n-grams, longest first; None for all that are indexed.
            since: occurrences that end there or before are left out.
        """
        found: list[Match] = []
        here = len(tokens)
        seen = {here if source is None else len(source)}  # nothing follows there
        for size in self.sizes if sizes is None else sizes:
            if size > here:
                continue
            before, end = self._before[size], self._last[size].get(tuple(tokens[here - size :]), 0)
            while end > since:
                if end not in seen:
                    seen.add(end)
                    found.append(Match(end, size, source))
                    if len(found) == limit:
                        return found
                end = before[end - size]
        return found


class Confidence:
    """How often lookups have been right in this sequence, learned as it grows.

    Estimates start from one success in two trials, so that the first lookups are tried.
    """

    def __init__(self) -> None:
        self._hits: Counter[int] = Counter()
        self._trials: Counter[int] = Counter()
        self._deeper_trials = 5.0
        self._deeper_hits = 0.8 * self._deeper_trials

    def first(self, size: int) -> float:
        """Probability that the first token of a continuation is right, given the n-gram's size."""
        return (self._hits[size] + 1) / (self._trials[size] + 2)

    @property
    def deeper(self) -> float:
        """Probability that the next token of a continuation is right if all before it were."""
        return self._deeper_hits / self._deeper_trials

    def observe(self, size: int, accepted: int, depth: int) -> None:
        """Learn from a step that accepted ``accepted`` draft tokens of a tree of this depth."""
        self._trials[size] += 1
        self._hits[size] += accepted > 0
        if accepted > 0 and depth > 1:
            # Old evidence fades: loops and copied passages begin and end.
            keep = 0.9
            self._deeper_hits = keep * self._deeper_hits + accepted - 1
            self._deeper_trials = keep * self._deeper_trials + min(accepted, depth - 1)


def continuation_tree(
    tokens: list[int], matches: Sequence[Match], max_depth: int, max_nodes: int,
    confidence: Confidence | None = None, min_probability: float = 0.0,
    vocabulary: int = MAX_SIZE,
) -> Row:  # fmt: skip
    """Merge the continuations of the matches into one tree.

    A continuation that reaches the end of the sequence continues with its own first tokens, so that
    a loop is continued to any depth; one in another source ends with its text, and all before a
    token that the model does not have. A node's probability is the share of the matches that pass
    through it (longer n-grams and later positions count more), times the ``confidence`` in such
    matches. The ``max_nodes`` most probable nodes are kept.

    Args:
        matches: from :meth:`NgramIndex.matches`, longest n-gram first.
        confidence: estimates learned so far; None for the initial ones.
        min_probability: draft tokens less probable than this are left out.
        vocabulary: number of tokens that the model has.

    Returns:
        The tree, likeliest nodes first; its root has the sequence's last token.
    """
    if not matches or max_depth < 1:
        return Row.root(tokens[-1])
    confidence = confidence or Confidence()
    longest = matches[0].size
    chance, deeper = confidence.first(longest), confidence.deeper
    weights = [
        WEIGHT_PER_NGRAM ** (match.size - longest) / (1 + order)
        for order, match in enumerate(matches)
    ]
    total = sum(weights)
    probability = [1.0]
    children: dict[tuple[int, int], int] = {}  # nodes by parent and token
    here = len(tokens)
    for (end, _, source), share in zip(matches, weights):
        weight = chance * (share / total)
        parent = 0
        for depth in range(1, max_depth + 1):
            place = end + depth - 1
            if source is not None:
                token = source[place] if place < len(source) else END
            else:
                token = tokens[place if place < here else end + (depth - 1) % (here - end)]
            if not 0 <= token < vocabulary:  # END, or of a prompt's images, of another model
                break
            parent = children.setdefault((parent, token), len(probability))
            if parent == len(probability):
                probability.append(0.0)
            probability[parent] += weight
            weight *= deeper
    # A parent is at least as probable as its child and precedes it, so the best nodes form a tree.
    parents, found = map(list, zip((-1, tokens[-1]), *children))
    row = Row(parents, found, probability).likeliest_first()
    size = 1 + min(sum(prob >= min_probability for prob in row.probs[1:]), max_nodes)
    return Row(row.parents[:size], row.tokens[:size], row.probs[:size])


@dataclass(frozen=True)
class Limits:
    """Limits of a lookup; the defaults are those of ``prompt_lookup``.

    Attributes:
        max_ngram, min_ngram: sizes of n-grams looked up, longest first.
        max_matches: occurrences whose continuations are merged (the tree's width).
        max_depth: tokens taken from each continuation.
        num_draft_tokens: most draft tokens in the tree; ``auto``: 15. The policy verifies as many
            of them as are worth their time.
        min_probability: draft tokens whose estimated probability is lower are left out.
    """

    max_ngram: int = setting(4, rule=_COUNT)
    min_ngram: int = setting(1, rule=_COUNT)
    max_matches: int = setting(8, rule=_COUNT)
    max_depth: int = setting(12, rule=_COUNT)
    num_draft_tokens: int | str = setting(AUTO, rule=count_or_auto(MAX_DRAFT_TOKENS, "15"))
    min_probability: float = setting(0.02, rule=number(0.0, 1.0))

    @property
    def max_nodes(self) -> int:
        """Most draft tokens in the tree."""
        return MOST_LOOKED_UP if self.num_draft_tokens == AUTO else int(self.num_draft_tokens)
