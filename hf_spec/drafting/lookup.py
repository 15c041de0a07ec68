"""Prompt lookup: draft tokens from the sequence itself, alone or merged into other drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_spec.core.host_tree import Row
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.drafting.drafter import Drafter
from hf_spec.drafting.ngram import Confidence, Limits, NgramIndex, continuation_tree
from hf_spec.drafting.state import DecodeState
from hf_spec.drafting.wrapped_drafter import WrappedDrafter


class SequenceLookup:
    """N-gram lookup in one growing sequence that learns how reliable it is."""

    def __init__(self, limits: Any):
        self.limits = limits
        self.index = NgramIndex(limits.min_ngram, limits.max_ngram)
        self.confidence = Confidence()
        self._longest = 0
        self._last = Row.root()

    def lookup(self, tokens: list[int], max_depth: int) -> Row:
        """The tree of continuations of ``tokens``."""
        limits = self.limits
        self.index.update(tokens)
        matches = self.index.matches(tokens, limits.max_matches)
        self._longest = matches[0][1] if matches else 0
        self._last = continuation_tree(
            tokens, matches, min(limits.max_depth, max_depth), limits.max_nodes, self.confidence,
            limits.min_probability,
        )  # fmt: skip
        return self._last

    def observe(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that followed the last lookup, once."""
        (parents, tokens, _), depths = self._last, self._last.depths
        self._last = Row.root()
        depth = min(max(depths), len(emitted))
        if not depth:
            return
        child = {(parents[n], tokens[n]): n for n in range(len(tokens) - 1, 0, -1)}
        node, accepted = 0, 0
        for token in emitted:
            if (node, token) not in child:
                break
            node, accepted = child[node, token], accepted + 1
        self.confidence.observe(self._longest, accepted, depth)


class BatchLookup:
    """A :class:`SequenceLookup` for each sequence of a batch."""

    def __init__(self, limits: Any, batch_size: int):
        self.rows = [SequenceLookup(limits) for _ in range(batch_size)]

    def lookup(self, state: DecodeState) -> list[Row]:
        """Each sequence's tree; the root alone for finished ones."""
        depth = state.max_depth
        return [
            one.lookup(tokens, depth) if active else Row.root(tokens[-1])
            for one, tokens, active in zip(self.rows, state.tokens, state.active)
        ]

    def observe(self, result: HostResult) -> None:
        for one, tokens in zip(self.rows, result.tokens):
            one.observe(tokens)

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


def with_lookup(drafter: Drafter) -> Drafter:
    """The drafter with lookups merged into its trees."""
    if isinstance(drafter, WrappedDrafter):
        drafter.inner = with_lookup(drafter.inner)
        return drafter
    return WithLookup(drafter)


class WithLookup(WrappedDrafter):
    """Merges lookups into another drafter's trees (option ``lookup=True``).

    A draft token that both propose becomes one node with the larger of the two probabilities.
    Looked-up tokens count as drawn from a distribution that puts all mass on them, so that
    rejection stays exact.
    """

    def __init__(self, inner: Drafter):
        super().__init__(inner)
        self.uses_lookup = True

    def start(self, state: DecodeState) -> None:
        self.inner.start(state)
        self.lookups = BatchLookup(Limits(), state.batch_size)

    def lookup(self, state: DecodeState) -> Tree:
        return Tree.of_rows(self.lookups.lookup(state), state.root.device)

    def propose(self, state: DecodeState) -> Tree:
        state.lookups = found = self.lookups.lookup(state)
        tree = self.inner.propose(state)
        if tree.host is not None and not tree.whole:
            rows = zip(tree.host.rows(tree.row_sizes), found)
            merged = [own.merge(other).likeliest_first() for own, other in rows]
            return Tree.of_rows(merged, tree.tokens.device)
        return _appended(tree, found)

    def observe(self, state: DecodeState, tree: Tree, result: HostResult) -> None:
        self.inner.observe(state, tree, result)
        self.lookups.observe(result)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.lookups.select(rows)


def _appended(tree: Tree, found: Sequence[Row]) -> Tree:
    """The trees, which are forwarded whole, with looked-up draft tokens appended."""
    drafted, sizes = tree.drafted, tree.row_sizes
    columns = drafted.parents.tolist(), drafted.tokens.tolist()
    own = [
        Row(parents[: size + 1], tokens[: size + 1], [1.0] * (size + 1))
        for parents, tokens, size in zip(*columns, sizes)
    ]
    rows = [row.merge(other) for row, other in zip(own, found)]
    merged, q = Tree.of_rows(rows, tree.tokens.device), tree.q
    if q is not None:
        certain = torch.nn.functional.one_hot(merged.tokens, q.shape[-1]).to(q.dtype)
        for row, size in enumerate(sizes):
            certain[row, : size + 1] = q[row, : size + 1]
        q = certain
    merged = merged.changed(q=q, host=None)
    if tree.group is None or tree.probe_counts is None:
        return merged
    # No probes at looked-up nodes: lookups hit in runs, so the next step mostly has one again, and
    # probes of all of them would be most of the step.
    counts = [
        [*counts[: size + 1], *[0] * (len(row.tokens) - size - 1)]
        for counts, size, row in zip(tree.probe_counts.tolist(), sizes, rows)
    ]
    return merged.attach_probes(tree.group, counts)
