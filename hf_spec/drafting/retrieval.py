"""Look-ups as drafts: candidates from the sequence itself, alone or merged into another draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_spec.core.probes import hang
from hf_spec.core.transfer import sent
from hf_spec.core.tree import TokenTree, TreeBatch, merge
from hf_spec.drafting.drafter import Chances, DecodingState, Draft, Drafter, Found, emitted
from hf_spec.drafting.ngram import Confidence, Limits, NgramIndex, continuation_tree
from hf_spec.drafting.wrapped_drafter import WrappedDrafter

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
        depth = state.max_depth
        return [
            one.lookup(tokens, depth) if active else NOTHING
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
