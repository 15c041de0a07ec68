"""Draft trees on the host: of one row as lists, of a batch as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hf_spec.core.probes import ProbeGroup, ProbeLayout
from hf_spec.core.token_tree import depths_of


class Row(NamedTuple):
    """One row's draft tree on the host.

    Attributes:
        parents: parent of each node, -1 for the root.
        tokens: token of each node.
        probs: probability of each node's path; no node is likelier than its parent.
    """

    parents: list[int]
    tokens: list[int]
    probs: list[float]

    @classmethod
    def root(cls, token: int = 0) -> Row:
        """The root alone."""
        return cls([-1], [token], [1.0])

    @property
    def depths(self) -> list[int]:
        return depths_of(self.parents)

    @property
    def children(self) -> dict[tuple[int, int], int]:
        """Nodes by parent and token, the first of those alike."""
        edges = list(zip(self.parents, self.tokens))
        return {edges[node]: node for node in range(len(edges) - 1, 0, -1)}

    def merge(self, other: Row) -> Row:
        """Both trees as one: nodes with the same token path become one, which keeps the larger
        probability. The nodes of this tree keep their indices."""
        parents, tokens, probs = list(self.parents), list(self.tokens), list(self.probs)
        child, index = self.children, [0]
        for parent, token, prob in zip(other.parents[1:], other.tokens[1:], other.probs[1:]):
            key = (index[parent], token)
            if key not in child:
                child[key] = len(parents)
                parents.append(key[0])
                tokens.append(token)
                probs.append(0.0)
            node = child[key]
            probs[node] = max(probs[node], prob)
            index.append(node)
        return Row(parents, tokens, probs)

    def likeliest_first(self) -> Row:
        """The nodes sorted by probability; draft tokens of probability 0 are left out."""
        order = sorted(range(len(self.parents)), key=lambda node: -self.probs[node])
        order = [node for node in order if self.probs[node] > 0]
        number = {node: index for index, node in enumerate(order)}
        return Row(
            [-1, *(number[self.parents[node]] for node in order[1:])],
            [self.tokens[node] for node in order], [self.probs[node] for node in order],
        )  # fmt: skip


class HostTree(NamedTuple):
    """Draft trees on the host, likeliest nodes first, as NumPy arrays ``(batch, nodes)``.

    Attributes:
        probs: float64 probability that all draft tokens down to a node are accepted: 1 for the
            root, 0 for padding, never more than the parent's.
        parents: int64; 0 for the root and padding.
        depths: int64
        tokens: int64; arbitrary on padding.
    """

    probs: Any
    parents: Any
    depths: Any
    tokens: Any

    def ancestors(
        self, group: ProbeGroup | None = None, probes: ProbeLayout | None = None,
        shape: tuple[int, int] | None = None,
    ) -> Any:  # fmt: skip
        """``(batch, nodes, nodes)`` bool: whether the second node is the first one, or an ancestor
        of it, or a probe of its group that it sees.

        Args:
            group, probes: the probes under the nodes, which come after these; None for none.
            shape: numbers of nodes and of probes, padding included; None for no padding. Padding
                has no ancestors; that of probes sees what the root sees.
        """
        batch, count = self.parents.shape
        nodes, behind = shape or (count, 0 if probes is None else probes.kinds.shape[1])
        seen = np.zeros((batch, nodes + behind, nodes + behind), bool)
        row, own = np.arange(batch)[:, None], np.arange(count)
        above = np.where(self.probs > 0, self.parents, own)
        node = np.broadcast_to(own, above.shape)
        for _ in range(int(self.depths.max()) + 1):
            seen[row, own, node] = True
            node = above[row, node]
        if group is not None and probes is not None:
            end = nodes + probes.kinds.shape[1]
            seen[:, nodes:end] = seen[row, probes.nodes]
            seen[:, nodes:end, nodes:end] = probes.visible(group)
        everyone = np.arange(nodes + behind)
        seen[:, everyone, everyone] = True
        return seen

    def rows(self, sizes: Sequence[int]) -> list[Row]:
        """Each row's tree, given its number of draft tokens."""
        columns = self.parents.tolist(), self.tokens.tolist(), self.probs.tolist()
        return [
            Row([-1, *parents[1 : size + 1]], tokens[: size + 1], probs[: size + 1])
            for parents, tokens, probs, size in zip(*columns, sizes)
        ]
