"""Candidates found in the sequence itself: n-gram look-up, and merging it into another draft.

Each new token is indexed once per n-gram size. The cost of a look-up depends on its result, not on
the length of the sequence. Plain lists and dictionaries are fast enough for short sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_spec.core.probes import hang
from hf_spec.core.transfer import sent
from hf_spec.core.tree import TokenTree, TreeBatch, merge
from hf_spec.drafting.drafter import Chances, DecodingState, Draft, Drafter, Found, emitted
from hf_spec.drafting.wrapped_drafter import WrappedDrafter

#: Factor on a match's weight per token of its n-gram.
WEIGHT_PER_NGRAM = 4.0


class NgramIndex:
    """Index of the positions where each n-gram of a sequence ends.

    Args:
        min_ngram, max_ngram: smallest and largest indexed size.
    """

    def __init__(self, min_ngram: int, max_ngram: int):
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0

    def update(self, tokens: Sequence[int]) -> None:
        """Index the n-grams of ``tokens`` that are new since the last call."""
        for end in range(self._indexed + 1, len(tokens) + 1):
            for size in self.sizes:
                if size <= end:
                    self._ends.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._indexed = len(tokens)

    def matches(
        self, tokens: Sequence[int], limit: int, same: bool = True
    ) -> list[tuple[int, int]]:
        """Earlier occurrences of the sequence's end: ``(end, size)``, longest n-gram first.

        Among equal sizes the latest comes first; each position occurs once, with its longest match.

        Args:
            tokens: the sequence.
            limit: largest number of matches.
            same: whether ``tokens`` is the indexed sequence, whose own end is no match.
        """
        found: list[tuple[int, int]] = []
        here = len(tokens)
        seen = {here} if same else set()
        for size in self.sizes:
            if size > here:
                continue
            for end in reversed(self._ends.get(tuple(tokens[here - size :]), ())):
                if end in seen:
                    continue
                seen.add(end)
                found.append((end, size))
                if len(found) == limit:
                    return found
        return found


class Confidence:
    """How often look-ups have been right in this sequence, learned as it grows.

    Estimates start from one success in two trials, so that the first look-ups are tried.

    Args:
        prior: confidence in other sequences; estimates start from it, and it is updated, too.
    """

    def __init__(self, prior: Confidence | None = None) -> None:
        self._prior = prior
        self._hits: dict[int, int] = {}
        self._trials: dict[int, int] = {}
        self._deeper_trials = 5.0
        self._deeper_hits = self._deeper_trials * (0.8 if prior is None else prior.deeper)

    def first(self, size: int) -> float:
        """Probability that the first token of a continuation is right, given the n-gram's size."""
        guess = 0.5 if self._prior is None else self._prior.first(size)
        return (self._hits.get(size, 0) + 2 * guess) / (self._trials.get(size, 0) + 2)

    @property
    def deeper(self) -> float:
        """Probability that the next token of a continuation is right if all before it were."""
        return self._deeper_hits / self._deeper_trials

    def observe(self, size: int, accepted: int, depth: int) -> None:
        """Learn from a step that accepted ``accepted`` candidates of a tree of this depth."""
        if self._prior is not None:
            self._prior.observe(size, accepted, depth)
        self._trials[size] = self._trials.get(size, 0) + 1
        self._hits[size] = self._hits.get(size, 0) + (accepted > 0)
        if accepted > 0 and depth > 1:
            # Old evidence fades: loops and copied passages begin and end.
            keep = 0.9
            self._deeper_hits = keep * self._deeper_hits + accepted - 1
            self._deeper_trials = keep * self._deeper_trials + min(accepted, depth - 1)


def continuation_tree(
    tokens: list[int],
    matches: list[tuple[int, int]],
    max_depth: int,
    max_nodes: int,
    confidence: Confidence | None = None,
    min_probability: float = 0.0,
) -> tuple[TokenTree, list[int], list[float]]:
    """Merge the continuations of the matches into one tree.

    A continuation that reaches the end of the sequence continues with its own first tokens, so that
    a loop is continued to any depth. A node's probability is the share of the matches that pass
    through it (longer n-grams and later positions count more), times the ``confidence`` in such
    matches. The ``max_nodes`` most probable nodes are kept.

    Args:
        tokens: the sequence.
        matches: from :meth:`NgramIndex.matches`.
        max_depth, max_nodes: limits of the tree.
        confidence: estimates learned so far; None for the initial ones.
        min_probability: candidates less probable than this are left out.

    Returns:
        The tree, its candidates' tokens (without the root's), and the probabilities of its nodes,
        likeliest first.
    """
    if not matches or max_depth < 1:
        return TokenTree.chain(0), [], [1.0]
    confidence = confidence or Confidence()
    chance, deeper = confidence.first(matches[0][1]), confidence.deeper
    shares = _shares(matches)
    # A trie of (parent, token, depth); children are found by (parent, token).
    trie: list[tuple[int, int, int]] = [(-1, -1, 0)]
    probability: list[float] = [1.0]
    children: dict[tuple[int, int], int] = {}
    here = len(tokens)
    for (end, _), share in zip(matches, shares):
        weight = chance * share
        parent = 0
        for depth in range(1, max_depth + 1):
            place = end + depth - 1
            token = tokens[place if place < here else end + (depth - 1) % (here - end)]
            key = (parent, token)
            node = children.get(key)
            if node is None:
                node = children[key] = len(trie)
                trie.append((parent, token, depth))
                probability.append(0.0)
            probability[node] += weight
            weight *= deeper
            parent = node
    # A parent is at least as probable as its child and precedes it, so the best nodes form a tree,
    # parents first.
    best = sorted(range(1, len(trie)), key=lambda node: -probability[node])[:max_nodes]
    best = [node for node in best if probability[node] >= min_probability]
    place_of = {0: 0}
    parents, kept = [-1], []
    for node in best:
        place_of[node] = len(parents)
        parents.append(place_of[trie[node][0]])
        kept.append(trie[node][1])
    return TokenTree.from_parents(parents), kept, [1.0, *(probability[node] for node in best)]


def _shares(matches: Sequence[tuple[int, int]]) -> list[float]:
    """The weight of each match; the sum is 1."""
    longest = matches[0][1]
    weights = [
        WEIGHT_PER_NGRAM ** (size - longest) / (1 + order)
        for order, (_, size) in enumerate(matches)
    ]
    total = sum(weights)
    return [weight / total for weight in weights]


def continuation_chain(
    tokens: Sequence[int],
    matches: Sequence[tuple[int, int]],
    max_depth: int,
    confidence: Confidence,
    min_probability: float = 0.0,
) -> tuple[list[int], list[float]]:
    """One path of :func:`continuation_tree`: each token is the likeliest after those before it.

    Args:
        tokens: the sequence; if it contains other sequences, a negative token follows each.
        matches: from :meth:`NgramIndex.matches`.
        max_depth: largest number of tokens.
        confidence: estimates learned so far.
        min_probability: the path ends where it is less probable than this.

    Returns:
        The path's tokens, and the probability of each with all before it.
    """
    found: list[int] = []
    chances: list[float] = []
    if not matches:
        return found, chances
    chance, here = confidence.first(matches[0][1]), len(tokens)
    going = [(end, share) for (end, _), share in zip(matches, _shares(matches))]
    for ahead in range(max_depth):
        shares: dict[int, float] = {}
        following: list[tuple[int, int, float]] = []
        for end, share in going:
            place = end + ahead
            token = tokens[place if place < here else end + ahead % (here - end)]
            if token >= 0:
                shares[token] = shares.get(token, 0.0) + share
                following.append((token, end, share))
        if not shares:
            break
        token = max(shares, key=shares.__getitem__)
        if chance * shares[token] < min_probability:
            break
        going = [(end, share) for one, end, share in following if one == token]
        found.append(token)
        chances.append(chance * shares[token])
        chance *= confidence.deeper
    return found, chances


@dataclass(frozen=True)
class Limits:
    """Limits of a look-up; the defaults are those of ``prompt_lookup``.

    Attributes:
        max_ngram, min_ngram: sizes of n-grams looked up, longest first.
        max_matches: occurrences whose continuations are merged (the tree's width).
        max_depth: tokens taken from each continuation.
        max_nodes: largest number of candidates in the tree.
        min_probability: candidates whose estimated probability is lower are left out.
    """

    max_ngram: int = 4
    min_ngram: int = 1
    max_matches: int = 8
    max_depth: int = 12
    max_nodes: int = 15
    min_probability: float = 0.02


#: The result for a row without a look-up.
NOTHING = Found(TokenTree.chain(0), [0], [1.0])


class Retrieval:
    """N-gram look-up in one growing sequence that learns how reliable it is."""

    def __init__(self, limits: Any):
        self.limits = limits
        self.index = NgramIndex(limits.min_ngram, limits.max_ngram)
        self.confidence = Confidence()
        self._longest = 0
        self._found = NOTHING

    def lookup(self, tokens: list[int], max_depth: int) -> Found:
        """The tree of continuations of ``tokens``."""
        limits = self.limits
        self.index.update(tokens)
        matches = self.index.matches(tokens, limits.max_matches)
        self._longest = matches[0][1] if matches else 0
        tree, candidates, chances = continuation_tree(
            tokens, matches, min(limits.max_depth, max_depth), limits.max_nodes, self.confidence,
            limits.min_probability,
        )  # fmt: skip
        self._found = Found(tree, [tokens[-1], *candidates], chances)
        return self._found

    def observe(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that followed the last look-up, once."""
        tree, tokens, _ = self._found
        self._found = NOTHING
        depth = min(tree.max_depth, len(emitted))
        if not depth:
            return
        child = {(tree.parents[n], tokens[n]): n for n in range(len(tokens) - 1, 0, -1)}
        node, accepted = 0, 0
        for token in emitted:
            if (node, token) not in child:
                break
            node, accepted = child[node, token], accepted + 1
        self.confidence.observe(self._longest, accepted, depth)


def draft_of(rows: Sequence[Found], device: torch.device | str) -> Draft:
    """A draft of trees built on the host."""
    tree = TreeBatch.stack([row.tree for row in rows], device)
    nodes = tree.num_nodes

    def filled(values: Sequence[Any]) -> list[Any]:
        return [*values, *[0] * (nodes - len(values))]

    chances = Chances(
        np.array([filled(row.chances) for row in rows], float),
        np.array([filled([0, *row.tree.parents[1:]]) for row in rows]),
        np.array([filled(row.tree.depths) for row in rows]),
        np.array([filled(row.tokens) for row in rows]),
    )
    return Draft(tree, sent(chances.tokens, device), chances=chances)


def with_retrieval(drafter: Drafter) -> Drafter:
    """The drafter with look-ups merged into its trees."""
    if isinstance(drafter, WrappedDrafter):
        drafter.inner = with_retrieval(drafter.inner)
        return drafter
    return WithRetrieval(drafter)


class WithRetrieval(WrappedDrafter):
    """Merges look-ups into another drafter's trees (option ``retrieval=True``).

    A candidate that both propose becomes one node with the larger of the two probabilities.
    Looked-up candidates count as drawn from a distribution that puts all mass on them, so that
    rejection stays exact.
    """

    def __init__(self, inner: Drafter):
        super().__init__(inner)
        self.looks_up = True

    def start(self, state: DecodingState) -> None:
        self.inner.start(state)
        self.rows = [Retrieval(Limits()) for _ in state.tokens]

    def _found(self, state: DecodingState) -> list[Found]:
        return [
            one.lookup(tokens, state.max_depth) if active else NOTHING
            for one, tokens, active in zip(self.rows, state.tokens, state.active)
        ]

    def look_up(self, state: DecodingState) -> Draft:
        return draft_of(self._found(state), state.root.device)

    def propose(self, state: DecodingState) -> Draft:
        state.found = found = self._found(state)
        draft = self.inner.propose(state)
        counts, chances = draft.tree.row_candidates, draft.chances
        if chances is not None and not draft.whole:
            rows = [
                _likeliest(one[1 : count + 1], own[: count + 1], paths, first)
                for one, own, paths, count, first in zip(
                    chances.parents.tolist(), chances.tokens.tolist(), chances.paths.tolist(),
                    counts, found,
                )
            ]  # fmt: skip
            return draft_of(rows, draft.tokens.device)
        own, parents = draft.tokens.tolist(), draft.tree.parents.tolist()
        merged = [
            merge(
                TokenTree.from_parents(parents[n][: count + 1]), own[n][: count + 1],
                found[n].tree, found[n].tokens[1:],
            )[:2]
            for n, count in enumerate(counts)
        ]  # fmt: skip
        return _appended(draft, merged)

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        self.inner.observe(state, draft, nodes)
        for one, tokens in zip(self.rows, emitted(state, nodes)):
            one.observe(tokens)

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        super().select(state, rows)
        self.rows = [self.rows[row] for row in rows]

    def replace_row(self, state: DecodingState, row: int) -> None:
        super().replace_row(state, row)
        self.rows[row] = Retrieval(Limits())


def _likeliest(
    parents: Sequence[int], tokens: Sequence[int], chances: Sequence[float], second: Found
) -> Found:
    """Merge two trees, likeliest first; ``parents`` are those of the first tree's candidates."""
    first = TokenTree.from_parents([-1, *parents])
    tree, own, places = merge(first, tokens, second.tree, second.tokens[1:])
    surest = [*chances[: len(first)], *[0.0] * (len(tree) - len(first))]
    for place, chance in zip(places, second.chances[1:]):
        surest[place] = max(surest[place], chance)
    return best_first(tree.parents, own, surest)


def best_first(parents: Sequence[int], tokens: Sequence[int], chances: Sequence[float]) -> Found:
    """Sort a tree's candidates, likeliest first; those of probability 0 are left out.

    Args:
        parents, tokens, chances: of its nodes; no node is likelier than its parent, which precedes
            it.
    """
    order = sorted(range(len(parents)), key=lambda node: -chances[node])
    order = [node for node in order if chances[node] > 0]
    number = {node: place for place, node in enumerate(order)}
    sorted_parents = [-1, *(number[parents[node]] for node in order[1:])]
    return Found(
        TokenTree.from_parents(sorted_parents), [tokens[node] for node in order],
        [chances[node] for node in order],
    )  # fmt: skip


def _appended(draft: Draft, merged: Sequence[tuple[TokenTree, list[int]]]) -> Draft:
    """The draft with looked-up candidates appended to its trees and tokens."""
    trees, rows = [tree for tree, _ in merged], [tokens for _, tokens in merged]
    device, nodes = draft.tokens.device, max(map(len, rows))
    padded = torch.tensor([row + [0] * (nodes - len(row)) for row in rows], device=device)
    distributions = draft.distributions
    if distributions is not None:
        certain = torch.nn.functional.one_hot(padded, distributions.shape[-1])
        certain = certain.to(distributions.dtype)
        for row, count in enumerate(draft.tree.row_candidates):
            certain[row, : count + 1] = distributions[row, : count + 1]
        distributions = certain
    stacked, probes = TreeBatch.stack(trees, device), None
    if draft.probes is not None:
        # No probes under looked-up nodes: look-ups hit in runs, so the next step mostly has one
        # again, and probes under all of them would be most of the step.
        sizes = [
            [*held[: count + 1], *[0] * (len(tree) - count - 1)]
            for held, count, tree in zip(draft.probes.sizes, draft.tree.row_candidates, trees)
        ]
        probes = hang(draft.probes.group, stacked, sizes)
    return Draft(stacked, padded, distributions, probes)
