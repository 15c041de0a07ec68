"""Looks up what continues a text in texts that are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_spec.core.checks import (
    AUTO,
    MAX_DRAFT_TOKENS,
    MAX_SIZE,
    count,
    count_or_auto,
    number,
    setting,
)
from hf_spec.core.device import FollowsRows, to_device
from hf_spec.core.shapes import HostTree, Row
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.threads import locked

# -- N-gram lookup: earlier occurrences of a sequence's end, and what followed them ----------------
#
# Each new token is indexed once per n-gram size. The cost of a lookup depends on its result, not on
# the length of the sequence. Plain lists and dictionaries are fast enough for short sequences.

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


# -- Prompt lookup: draft tokens from the sequence itself, alone or merged into other drafts -------

#: Longest n-gram that is looked up in earlier answers.
HISTORY_NGRAM = 4
#: Most other answers to its prompt that a sequence's lookup searches.
OTHERS = 8


class History:
    """Answers of earlier calls with a model, which lookups search, too (option ``lookup_history``).

    Threads may search it while another one adds an answer.

    Args:
        size: tokens that are kept at least, as soon as there are so many; twice as many at most.
    """

    def __init__(self, size: int):
        self.size = size
        self._parts = self._nothing()

    @staticmethod
    def _nothing() -> tuple[list[int], NgramIndex]:
        return [], NgramIndex(1, HISTORY_NGRAM)

    def matches(self, tokens: Sequence[int], limits: Limits) -> list[Match]:
        """Occurrences of a sequence's end; see :meth:`NgramIndex.matches`."""
        known, index = self._parts
        sizes = range(min(limits.max_ngram, HISTORY_NGRAM), limits.min_ngram - 1, -1)
        return index.matches(tokens, limits.max_matches, known, sizes)

    @locked
    def add(self, answers: Iterable[Sequence[int]]) -> None:
        """Keep these token sequences, and drop the oldest if there are too many."""
        known, index = self._parts
        for answer in answers:
            known += [*answer, END]  # before they are indexed
        if len(known) > 2 * self.size:
            known, index = known[-self.size :], NgramIndex(1, HISTORY_NGRAM)
        self._parts = self._nothing()  # if what follows is interrupted
        index.update(known)
        self._parts = known, index


class SequenceLookup:
    """N-gram lookup in one growing sequence that learns how reliable it is.

    Args:
        prompt: number of tokens of the sequence that are its prompt.
        others: what is searched beside the sequence itself.
        vocabulary: number of tokens that the model has; no others are drafted.
    """

    def __init__(
        self, limits: Limits, prompt: int = 0, others: Sequence[History | SequenceLookup] = (),
        vocabulary: int = MAX_SIZE,
    ):  # fmt: skip
        self.limits, self.prompt, self.others = limits, prompt, others
        self.vocabulary = vocabulary
        self._tokens: list[int] = []
        self.index = NgramIndex(limits.min_ngram, limits.max_ngram)
        self.confidence = Confidence()
        self._longest = 0
        self._last = Row.root()

    def lookup(self, tokens: list[int], max_depth: int, known: Row | None = None) -> Row:
        """The tree of continuations of ``tokens``; with ``known``, what is known to follow them, of
        this and of the continuations of its likeliest path."""
        self._tokens = tokens
        self.index.update(tokens)
        self._last, self._longest = self._continued(tokens, max_depth)
        if known is None:
            return self._last
        end = known.end
        if path := known.path(end):
            more, _ = self._continued([*tokens, *path], max_depth - len(path))
            known = known.merge(more, end)
        return known.merge(self._last).likeliest_first()

    def _continued(self, tokens: list[int], max_depth: int) -> tuple[Row, int]:
        """The tree of continuations, and the size of the longest match."""
        limits = self.limits
        matches = self.index.matches(tokens, limits.max_matches)
        if self.others:
            for other in self.others:
                matches += other.matches(tokens, limits)
            matches.sort(key=lambda match: -match.size)
            del matches[limits.max_matches :]
        tree = continuation_tree(
            tokens, matches, min(limits.max_depth, max_depth), limits.max_nodes, self.confidence,
            limits.min_probability, self.vocabulary,
        )  # fmt: skip
        return tree, matches[0].size if matches else 0

    def matches(self, tokens: Sequence[int], limits: Limits) -> list[Match]:
        """Occurrences of another sequence's end in this one's answer."""
        return self.index.matches(tokens, limits.max_matches, self._tokens, since=self.prompt)

    def observe(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that followed the last lookup, once."""
        child, depth = self._last.children, min(max(self._last.depths), len(emitted))
        self._last = Row.root()
        if not depth:
            return
        node, accepted = 0, 0
        for token in emitted:
            if (node, token) not in child:
                break
            node, accepted = child[node, token], accepted + 1
        self.confidence.observe(self._longest, accepted, depth)


class Rowwise(FollowsRows):
    """What the host drafts for each sequence of a batch.

    Attributes:
        rows: what drafts for one of them, each with a method ``lookup(tokens, depth)``.
    """

    of_rows = ("rows",)
    rows: Sequence[Any]

    def lookup(
        self, sequences: Sequence[list[int]], active: Sequence[bool], depth: int,
        *known: Sequence[Row],
    ) -> list[Row]:  # fmt: skip
        """Each sequence's tree, no deeper than ``depth``; the root alone for finished ones.

        Args:
            known: what is known to follow each of them, which its tree then contains, and goes on.
        """
        return [
            row.lookup(tokens, depth, *own) if unfinished else Row.root(tokens[-1])
            for row, tokens, unfinished, *own in zip(self.rows, sequences, active, *known)
        ]


class BatchLookup(Rowwise):
    """A :class:`SequenceLookup` for each sequence of a batch, which also searches :data:`OTHERS`
    other answers to its prompt.

    Args:
        prompts: the sequences before their first new token.
        vocabulary: see :class:`SequenceLookup`.
    """

    rows: list[SequenceLookup]

    def __init__(
        self, limits: Limits, prompts: Sequence[Sequence[int]], history: History | None = None,
        vocabulary: int = MAX_SIZE,
    ):  # fmt: skip
        self.rows = [SequenceLookup(limits, len(one), vocabulary=vocabulary) for one in prompts]
        answers: dict[tuple[int, ...], list[SequenceLookup]] = {}
        for row, prompt in zip(self.rows, prompts):
            answers.setdefault(tuple(prompt), []).append(row)
        earlier = [] if history is None else [history]
        for same in answers.values():
            for place, row in enumerate(same):
                after = range(place + 1, place + min(OTHERS + 1, len(same)))
                row.others = [*(same[other % len(same)] for other in after), *earlier]

    def observe(self, result: HostResult) -> None:
        for one, tokens in zip(self.rows, result.tokens):
            one.observe(tokens)


def merged(tree: Tree, lookups: Sequence[Row]) -> Tree:
    """A step's trees with what was looked up for each row, or is forced; the same trees if nothing
    was.

    A draft token of both becomes one node with the larger of the two probabilities. Looked-up
    tokens count as drawn from a distribution that puts all mass on them, so that rejection stays
    exact.
    """
    assert tree.host is not None
    if not any(len(row.tokens) > 1 for row in lookups):
        return tree
    if tree.num_nodes == 1:
        return Tree.of_rows(lookups, tree.device)
    if not tree.is_of_rows:
        return _appended(tree, tree.host, lookups)
    rows = zip(tree.host.rows(tree.row_sizes), lookups)
    both = [row.merge(other).likeliest_first() for row, other in rows]
    return Tree.of_rows(both, tree.device).changed(whole=tree.whole)


def _appended(tree: Tree, host: HostTree, lookups: Sequence[Row]) -> Tree:
    """The trees, which are forwarded whole, with looked-up draft tokens appended."""
    sizes = tree.row_sizes
    # A transfer, if the device has chosen the tokens that looked-up ones may be equal to.
    known = (host.tokens if tree.chosen is None else tree.chosen).tolist()
    own = [
        Row(row.parents, tokens[: size + 1], [1.0] * (size + 1))
        for row, tokens, size in zip(host.rows(sizes), known, sizes)
    ]
    rows = [row.merge(other) for row, other in zip(own, lookups)]
    both, q = Tree.of_rows(rows, tree.device), tree.q
    if q is not None:
        assert both.host is not None
        tokens = to_device(both.host.tokens, q.device)
        certain = torch.nn.functional.one_hot(tokens, q.shape[-1]).to(q.dtype)
        for row, size in enumerate(sizes):
            certain[row, : size + 1] = q[row, : size + 1]
        q = certain
    both = both.changed(q=q, ranked=False)
    if tree.group is None or tree.probes is None:
        return both
    # No probes at looked-up nodes: lookups hit in runs, so the next step mostly has one again, and
    # probes of all of them would be most of the step.
    counts = [[*row[: size + 1]] for row, size in zip(tree.probes.counts.tolist(), sizes)]
    return both.attach_probes(tree.group, counts)
