"""Draft trees of a batch, on the host and on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_spec.core.device import to_device
from hf_spec.core.shapes import ProbeGroup, ProbeLayout, TokenTree, depths_of
from hf_spec.threads import cached_property

# -- Draft trees on the host: of one row as lists, of a batch as NumPy arrays ----------------------


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


# -- The block of tokens that one step forwards: a draft tree per batch row, and its probes --------
#
# Node 0 is the **root**: the last emitted token, already certain. The draft tokens follow, parents
# before their children. *Probes* come last: nodes that cannot be accepted, with learned embeddings
# in place of token embeddings (:mod:`.probes`). What a node sees, its ``ancestors``, is the one
# fact derived from the rest: the attention mask and the verification both read it.


@dataclass(frozen=True)
class Tree:
    """One draft tree per batch row with its probes, padded to the largest.

    Attributes:
        tokens: ``(batch, nodes)`` int64 token ids; of a probe, the index of its embedding.
        parents: ``(batch, nodes)`` int64; -1 for the root, 0 for padding; of a probe, the node that
            it is attached to.
        depths: ``(batch, nodes)`` int64 positions after the root.
        valid: ``(batch, nodes)`` bool; False for padding, which attends to the prefix and to
            itself, and for draft tokens that must not be accepted.
        row_sizes: number of draft tokens of each row.
        row_depths: depth of each row's deepest draft token.
        group: the full group of probes; a node with fewer has the first ones. None without probes.
        first_probe: ``(batch, tokens)`` index of the first probe of each node that has a token,
            counted after these nodes.
        probe_counts: ``(batch, tokens)`` how many probes each of them has.
        probes: where they are, on the host; None if it does not know, or there are none.
        q: ``(batch, tokens, vocab)`` distribution that each draft token was sampled from, after all
            logits processors; None if none was sampled. That of the root is ignored.
        host: the trees without probes on the host; None where it does not know them, as in recorded
            code.
        ranked: whether it knows the tokens and how likely nodes are, too. The policy then chooses
            how many of them are forwarded.
        whole: whether all nodes are forwarded anyway.
        slots: ``(batch, tokens)`` place of each node in the step's block of the KV cache; None if
            it is the node's index.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    valid: Tensor
    row_sizes: tuple[int, ...]
    row_depths: tuple[int, ...]
    group: ProbeGroup | None = None
    first_probe: Tensor | None = None
    probe_counts: Tensor | None = None
    probes: ProbeLayout | None = None
    q: Tensor | None = None
    host: HostTree | None = None
    ranked: bool = False
    whole: bool = False
    slots: Tensor | None = None

    # -- construction ------------------------------------------------------------------------

    @staticmethod
    def of_shapes(shapes: Sequence[TokenTree], device: torch.device | str = "cpu") -> Tree:
        """A tree of each shape, without tokens yet; see :meth:`with_tokens`."""
        return _of_shapes(tuple(shapes), str(device))

    @staticmethod
    def roots(tokens: Tensor) -> Tree:
        """The roots alone. ``tokens``: (batch,)."""
        shapes = [TokenTree.chain(0)] * len(tokens)
        return Tree.of_shapes(shapes, tokens.device).with_tokens(tokens[:, None])

    @staticmethod
    def chain(tokens: Tensor) -> Tree:
        """A chain of tokens ``(batch, nodes)`` in every row, the root first."""
        batch, nodes = tokens.shape
        order = torch.arange(nodes, device=tokens.device)
        parents = np.broadcast_to(np.maximum(np.arange(nodes) - 1, 0), (batch, nodes))
        depths = np.broadcast_to(np.arange(nodes), (batch, nodes))
        return Tree(
            tokens, (order - 1).expand(batch, -1), order.expand(batch, -1),
            torch.ones(batch, nodes, dtype=torch.bool, device=tokens.device),
            (nodes - 1,) * batch, (nodes - 1,) * batch,
            host=HostTree(np.ones(depths.shape), parents, depths, np.zeros_like(depths)),
        )  # fmt: skip

    @staticmethod
    def of_rows(rows: Sequence[Row], device: torch.device | str) -> Tree:
        """Trees built on the host; nodes must be sorted, likeliest first."""
        parents = filled([row.parents for row in rows])
        host = HostTree(
            np.array(filled([row.probs for row in rows]), float), np.maximum(parents, 0),
            np.array(filled([row.depths for row in rows])),
            np.array(filled([row.tokens for row in rows])),
        )  # fmt: skip
        return Tree.of_host(host, [len(row.tokens) - 1 for row in rows], device)

    @staticmethod
    def of_host(
        host: HostTree, sizes: Sequence[int], device: torch.device | str,
        group: ProbeGroup | None = None, probes: ProbeLayout | None = None,
        shape: tuple[int, int] | None = None,
    ) -> Tree:  # fmt: skip
        """Trees that the host knows, with these numbers of draft tokens, in few transfers.

        Args:
            host: the trees without probes.
            group, probes: the probes under their nodes; None for none.
            shape: numbers of nodes with a token, and of probes, padding included; None for no
                padding.
        """
        batch, count = host.tokens.shape
        nodes, behind = shape or (count, 0 if probes is None else probes.kinds.shape[1])
        real = np.arange(count) <= np.array(sizes)[:, None]
        depths = np.where(real, host.depths, 1)
        row_depths = tuple((depths * real).max(1).tolist())
        above = host.parents * real
        above[:, 0] = -1
        parts = np.zeros((4 if probes is None else 6, batch, nodes + behind), np.int64)
        parts[:4, :, :count] = host.tokens, above, depths, real
        if group is not None and probes is not None:
            end = nodes + probes.kinds.shape[1]
            under = probes.depths(depths, group)
            parts[:4, :, nodes:end] = probes.kinds, probes.nodes, under, probes.real
            parts[4:, :, :count] = probes.first, probes.counts
        tokens, parents, deep, valid, *places = to_device(parts, device)
        first, counts = (part[:, :nodes] for part in places) if places else (None, None)
        tree = Tree(
            tokens, parents, deep, valid.bool(), tuple(sizes), row_depths, group, first, counts,
            probes, host=host, ranked=True,
        )  # fmt: skip
        if shape is None:  # else it is forwarded; it may still be cut
            return tree
        return tree.with_ancestors(to_device(host.ancestors(group, probes, shape), device))

    @staticmethod
    def packed(parents: Tensor, depths: Tensor, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Trees as ``(batch, 4 * nodes)`` float32 numbers, for a single transfer to the host.

        float32 represents integers below 2 ** 24, and so all tokens, exactly.

        Args:
            parents: ``(batch, nodes)`` int64, likeliest nodes first.
            depths: ``(batch, nodes)`` int64.
            tokens: ``(batch, nodes)`` int64.
            log_probs: ``(batch, nodes)`` of the path down to each node; 0 for the root,
                -inf for padding, which comes last.
        """
        parts = parents, depths, tokens, log_probs
        return torch.cat([part.to(log_probs.device, torch.float32) for part in parts], dim=1)

    @staticmethod
    def unpacked(packed: Tensor, numbers: np.ndarray | None = None) -> Tree:
        """Inverse of :meth:`packed`; ``numbers``: the same on the host, None to transfer it."""
        if numbers is None:
            numbers = packed.cpu().numpy()
        parents, depths, tokens, log_probs = np.split(numbers, 4, axis=1)
        probs = np.exp(log_probs.astype(np.float64))
        parents, depths, tokens = (part.astype(np.int64) for part in (parents, depths, tokens))
        real = probs > 0
        host = HostTree(probs, np.maximum(parents, 0) * real, depths, tokens)
        return Tree.of_host(host, (real.sum(1) - 1).tolist(), packed.device)

    # -- shape -------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Number of rows of the batch."""
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """Root, draft tokens and probes, padding included."""
        return self.tokens.shape[1]

    @property
    def num_tokens(self) -> int:
        """Root and draft tokens, padding included."""
        return self.num_nodes if self.first_probe is None else self.first_probe.shape[1]

    @property
    def num_probes(self) -> int:
        """Probes, padding included."""
        return self.num_nodes - self.num_tokens

    @property
    def max_depth(self) -> int:
        """Depth of the deepest draft token."""
        return max(self.row_depths)

    @property
    def is_chain(self) -> bool:
        """Whether every row is known to be a chain."""
        return self.host is not None and self.row_depths == self.row_sizes

    @cached_property
    def ancestors(self) -> Tensor:
        """``(batch, nodes, nodes)`` bool; ``[b, q, k]``: q sees k, which is q, one of its
        ancestors, or a probe of its group."""
        nodes, device = self.num_nodes, self.parents.device
        if self.is_chain and not self.ranked and min(self.row_sizes) + 1 == nodes:
            order = torch.arange(nodes, device=device)
            return (order <= order[:, None]).expand(self.batch_size, -1, -1)
        assert self.host is not None
        return to_device(self.host.ancestors(self.group, self.probes), device)

    @property
    def drafted(self) -> Tree:
        """The trees without probes."""
        return self if self.first_probe is None else self._drafted

    @cached_property
    def _drafted(self) -> Tree:
        nodes = self.num_tokens
        tree = dataclasses.replace(
            self, tokens=self.tokens[:, :nodes], parents=self.parents[:, :nodes],
            depths=self.depths[:, :nodes], valid=self.valid[:, :nodes], group=None,
            first_probe=None, probe_counts=None, probes=None,
        )  # fmt: skip
        return tree.with_ancestors(self.ancestors[:, :nodes, :nodes])

    def probes_of(self, nodes: Tensor) -> Tensor:
        """``(batch, len(group))`` indices, among all nodes, of the probes of one node ``(batch,)``
        per row; entries past the size of the node's group are arbitrary."""
        assert self.group is not None and self.first_probe is not None
        steps = torch.arange(len(self.group), device=nodes.device)
        index = self.first_probe.gather(1, nodes[:, None]) + steps
        return self.num_tokens + index.clamp(max=self.num_probes - 1)

    # -- changes -----------------------------------------------------------------------------

    def changed(self, **fields: Any) -> Self:
        """A copy with other fields, but the same shape: ``ancestors`` remain."""
        tree = dataclasses.replace(self, **fields)
        return tree.with_ancestors(vars(self).get("ancestors"))

    def with_ancestors(self, ancestors: Tensor | None) -> Self:
        """Set :attr:`ancestors` where they are known; returns the tree."""
        if ancestors is not None:
            vars(self)["ancestors"] = ancestors
        return self

    def with_tokens(self, tokens: Tensor, q: Tensor | None = None) -> Tree:
        """The trees with these tokens ``(batch, tokens)`` in place of those of their nodes."""
        if self.num_probes:
            tokens = torch.cat([tokens, self.tokens[:, self.num_tokens :]], dim=1)
        # Trees without tokens are kept from step to step: their ancestors are computed once.
        return self.changed(tokens=tokens, q=q, ranked=False).with_ancestors(self.ancestors)

    def without(self, tokens: Sequence[int]) -> Tree:
        """The trees in which draft tokens of these ids cannot be accepted."""
        unwanted = to_device(tokens, self.tokens.device)
        found = torch.isin(self.tokens, unwanted).to(self.valid.device)
        found[:, 0] = False
        found[:, self.num_tokens :] = False  # probes, whose tokens are indices
        return self.changed(valid=self.valid & ~found, ranked=False)

    def within(self, depths: Sequence[int]) -> Tree:
        """The trees in which draft tokens deeper than this, per row, cannot be accepted."""
        if self.max_depth <= min(depths):
            return self
        deep = self.depths > to_device(depths, self.depths.device)[:, None]
        deep[:, self.num_tokens :] = False  # probes
        return self.changed(valid=self.valid & ~deep, ranked=False)

    def likeliest(self, count: int) -> Tree:
        """The ``count`` likeliest draft tokens of ranked trees without probes."""
        nodes, host = count + 1, self.host
        if nodes >= self.num_nodes:
            return self
        assert host is not None
        host = HostTree(*(part[:, :nodes] for part in host))
        sizes = tuple(min(size, count) for size in self.row_sizes)
        depths = host.depths.tolist()
        row_depths = tuple(max(row[: size + 1]) for row, size in zip(depths, sizes))
        return Tree(
            self.tokens[:, :nodes], self.parents[:, :nodes], self.depths[:, :nodes],
            self.valid[:, :nodes], sizes, row_depths, host=host, ranked=True,
        )  # fmt: skip

    def attach_probes(
        self, group: ProbeGroup, counts: Sequence[Sequence[int]] | None = None,
        shared: bool = False,
    ) -> Tree:  # fmt: skip
        """The trees with probes of a group: so many of the first ones under each node of each
        row's tree as ``counts`` has, or all of them. ``shared``: all nodes have those of the root,
        a node of depth d without the first d."""
        host, nodes = self.host, self.num_nodes
        assert host is not None
        counts = [[len(group)] * nodes] * self.batch_size if counts is None else counts
        probes = ProbeLayout.of([[*row, *[0] * (nodes - len(row))] for row in counts])
        if shared:
            own = np.where(host.probs > 0, host.depths, 1)
            probes = probes._replace(first=own, counts=probes.counts[:, :1] - own)
        tree = Tree.of_host(host, self.row_sizes, self.parents.device, group, probes)
        if not self.ranked:
            valid = torch.cat([self.valid, tree.valid[:, nodes:]], dim=1)
            tree = tree.with_tokens(self.tokens, self.q).changed(valid=valid)
        return tree.changed(whole=self.whole)

    # -- for compiled code -------------------------------------------------------------------

    def padded(self, tokens: int, probes: int) -> Tree:
        """The trees padded to these numbers of nodes with tokens, and of probes."""
        if self.host is not None and self.ranked:
            shape, device = (tokens, probes), self.parents.device
            return Tree.of_host(self.host, self.row_sizes, device, self.group, self.probes, shape)
        nodes, more, behind = self.num_tokens, tokens - self.num_tokens, probes - self.num_probes

        def wider(part: Tensor) -> Tensor:
            own = pad(part[:, :nodes], (0, more))
            return torch.cat([own, pad(part[:, nodes:], (0, behind))], dim=1) if probes else own

        tree = dataclasses.replace(
            self, tokens=wider(self.tokens), parents=wider(self.parents),
            depths=wider(self.depths), valid=wider(self.valid), host=None,
            first_probe=None if self.first_probe is None else pad(self.first_probe, (0, more)),
            probe_counts=None if self.probe_counts is None else pad(self.probe_counts, (0, more)),
        )  # fmt: skip
        seen = pad(self.ancestors[:, :nodes, :nodes], (0, more + probes) * 2)
        if self.num_probes:
            end = tokens + self.num_probes
            seen[:, tokens:end, :nodes] = self.ancestors[:, nodes:, :nodes]
            seen[:, tokens:end, tokens:end] = self.ancestors[:, nodes:, nodes:]
        seen.diagonal(0, 1, 2).fill_(True)
        return tree.with_ancestors(seen)

    def tensors(self) -> list[Tensor]:
        """The tensors that a forward and its verification read; see :meth:`with_tensors`."""
        parts = [self.tokens, self.parents, self.depths, self.valid, self.ancestors]
        return parts + [part for part in (self.first_probe, self.probe_counts) if part is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Tree:
        """A tree of these :meth:`tensors`; of its depths on the host only upper bounds remain."""
        tokens, parents, depths, valid, ancestors, *probes = tensors
        most = (self.num_tokens - 1,) * self.batch_size
        first, counts = probes or (None, None)
        tree = Tree(tokens, parents, depths, valid, most, most, self.group, first, counts)
        return tree.with_ancestors(ancestors)


@lru_cache(maxsize=256)
def _of_shapes(shapes: tuple[TokenTree, ...], device: str) -> Tree:
    sizes = [shape.num_draft_tokens for shape in shapes]
    parents = np.maximum(filled([shape.parents for shape in shapes]), 0)
    real = np.arange(parents.shape[1]) <= np.array(sizes)[:, None]
    depths = np.array(filled([shape.depths for shape in shapes]))
    host = HostTree(real.astype(float), parents, depths, np.zeros_like(parents))
    return Tree.of_host(host, sizes, device).changed(ranked=False)


def filled(rows: Sequence[Sequence[Any]], value: Any = 0) -> list[list[Any]]:
    """Rows of one length, with a value behind the shorter ones."""
    most = max(map(len, rows))
    return [[*row, *[value] * (most - len(row))] for row in rows]
