"""Prompt lookup: draft tokens from the sequence itself, alone or merged into other drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hf_spec.core.host_tree import HostTree, Row
from hf_spec.core.limits import MAX_SIZE
from hf_spec.core.memory import locked, recall
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.drafting.ngram import END, Confidence, Limits, Match, NgramIndex, continuation_tree

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
        self._parts: tuple[list[int], NgramIndex] = [], NgramIndex(1, HISTORY_NGRAM)

    @classmethod
    def of(cls, model: Any, size: int) -> History | None:
        """That of a model and size, which all calls share; None if ``size`` is 0."""
        return recall(model, (History, size), lambda: cls(size)) if size else None

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
        self._parts = [], NgramIndex(1, HISTORY_NGRAM)  # if what follows is interrupted
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

    def lookup(self, tokens: list[int], max_depth: int) -> Row:
        """The tree of continuations of ``tokens``."""
        limits, self._tokens = self.limits, tokens
        self.index.update(tokens)
        matches = self.index.matches(tokens, limits.max_matches)
        if self.others:
            for other in self.others:
                matches += other.matches(tokens, limits)
            matches.sort(key=lambda match: -match.size)
            del matches[limits.max_matches :]
        self._longest = matches[0].size if matches else 0
        self._last = continuation_tree(
            tokens, matches, min(limits.max_depth, max_depth), limits.max_nodes, self.confidence,
            limits.min_probability, self.vocabulary,
        )  # fmt: skip
        return self._last

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


class BatchLookup:
    """A :class:`SequenceLookup` for each sequence of a batch, which also searches :data:`OTHERS`
    other answers to its prompt.

    Args:
        prompts: the sequences before their first new token.
        vocabulary: see :class:`SequenceLookup`.
    """

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

    def lookup(
        self, sequences: Sequence[list[int]], active: Sequence[bool], depth: int
    ) -> list[Row]:
        """Each sequence's tree, no deeper than ``depth``; the root alone for finished ones."""
        return [
            row.lookup(tokens, depth) if unfinished else Row.root(tokens[-1])
            for row, tokens, unfinished in zip(self.rows, sequences, active)
        ]

    def observe(self, result: HostResult) -> None:
        for one, tokens in zip(self.rows, result.tokens):
            one.observe(tokens)

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


def merged(tree: Tree, lookups: Sequence[Row]) -> Tree:
    """A step's trees with what was looked up for each row (option ``lookup=True``).

    A draft token of both becomes one node with the larger of the two probabilities. Looked-up
    tokens count as drawn from a distribution that puts all mass on them, so that rejection stays
    exact.
    """
    assert tree.host is not None
    if tree.whole or not tree.ranked:
        return _appended(tree, tree.host, lookups)
    rows = zip(tree.host.rows(tree.row_sizes), lookups)
    both = [row.merge(other).likeliest_first() for row, other in rows]
    return Tree.of_rows(both, tree.tokens.device)


def _appended(tree: Tree, host: HostTree, lookups: Sequence[Row]) -> Tree:
    """The trees, which are forwarded whole, with looked-up draft tokens appended."""
    sizes = tree.row_sizes
    # A transfer: the device has chosen the tokens that looked-up ones may be equal to.
    known = tree.tokens[:, : tree.num_tokens].tolist()
    own = [
        Row(row.parents, tokens[: size + 1], [1.0] * (size + 1))
        for row, tokens, size in zip(host.rows(sizes), known, sizes)
    ]
    rows = [row.merge(other) for row, other in zip(own, lookups)]
    both, q = Tree.of_rows(rows, tree.tokens.device), tree.q
    if q is not None:
        certain = torch.nn.functional.one_hot(both.tokens, q.shape[-1]).to(q.dtype)
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
