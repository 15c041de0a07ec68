"""The draft trees of a batch, as a step forwards them, and attention masks."""

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

from hf_spec.core.device import Ragged, all_to_device, to_device
from hf_spec.core.shapes import HostTree, ProbeGroup, ProbeLayout, Row, TokenTree
from hf_spec.threads import cached_property

# -- The block of tokens that one step forwards: a draft tree per batch row, and its probes --------
#
# Node 0 is the **root**: the last emitted token, already certain. The draft tokens follow, parents
# before their children. *Probes* come last: nodes that cannot be accepted, with learned embeddings
# in place of token embeddings (:class:`ProbeGroup`). What a node sees, its ``ancestors``, is the
# one fact derived from the rest: the attention mask and the verification both read it.


#: Share of a batch's places with a node, below which its padding is worth leaving out.
RAGGED = 7 / 8


class TreeTensors(NamedTuple):
    """What the device has of trees: all that a forward and its verification read.

    Attributes:
        tokens: ``(batch, nodes)`` int64 token ids; of a probe, the index of its embedding.
        parents: ``(batch, nodes)`` int64; -1 for the root, 0 for padding; of a probe, the node that
            it is attached to.
        depths: ``(batch, nodes)`` int64 positions after the root.
        valid: ``(batch, nodes)`` bool; False for padding, which attends to the prefix and to
            itself, and for draft tokens that must not be accepted.
        ancestors: ``(batch, nodes, nodes)`` bool; ``[b, q, k]``: q sees k, which is q, one of its
            ancestors, or a probe of its group.
        first_probe: ``(batch, tokens)`` int64 index of the first probe of each node that has a
            token, counted after these nodes; None without probes.
        probe_counts: ``(batch, tokens)`` int64, how many probes each of them has.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    valid: Tensor
    ancestors: Tensor
    first_probe: Tensor | None = None
    probe_counts: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of nodes with a token, and of probes."""
        nodes = self.tokens.shape[1]
        count = nodes if self.first_probe is None else self.first_probe.shape[1]
        return count, nodes - count

    def cut(self, tokens: int, probes: int) -> TreeTensors:
        """Those of the first nodes with a token, and of the first probes."""
        first = self.shape[0]
        if (tokens, probes) == self.shape:
            return self

        def own(part: Tensor, dim: int = 1) -> Tensor:
            if not probes or tokens == first:
                return part.narrow(dim, 0, tokens + probes)
            pair = part.narrow(dim, 0, tokens), part.narrow(dim, first, probes)
            return torch.cat(pair, dim)

        *parts, seen = map(own, self[:5])
        places = [part[:, :tokens] for part in self[5:] if part is not None and probes]
        return TreeTensors._make([*parts, own(seen, 2), *places, None, None][:7])

    def padded(self, nodes: int) -> TreeTensors:
        """Those of trees without probes, padded to so many nodes."""
        more = 0, nodes - self.tokens.shape[1]
        parts, seen = [pad(part, more) for part in self[:4]], pad(self.ancestors, more * 2)
        seen.diagonal(0, 1, 2).fill_(True)
        return TreeTensors._make([*parts, seen, None, None])


@dataclass(frozen=True, eq=False)
class Tree:
    """One draft tree per batch row with its probes, padded to the largest.

    All changes are the host's. What the device needs, :attr:`tensors`, is made from what the host
    knows and transferred once, when it is first asked for.

    Attributes:
        row_sizes: number of draft tokens of each row.
        row_depths: depth of each row's deepest draft token.
        shape: numbers of nodes with a token, and of probes, padding included.
        device: where its tensors are.
        host: the trees without probes on the host; None where it does not know them, as in recorded
            code.
        group: the full group of probes; a node with fewer has the first ones. None without probes.
        probes: where they are, on the host; None if it does not know, or there are none.
        usable: ``(batch, nodes)`` bool NumPy array, False for draft tokens that must not be
            accepted; None if there are none.
        chosen: ``(batch, tokens)`` tokens that only the device knows; None if the host does.
        q: ``(batch, tokens, vocab)`` distribution that each draft token was sampled from, after all
            logits processors; None if none was sampled. That of the root is ignored.
        ranked: whether the host knows the tokens and how likely nodes are, too. The policy then
            chooses how many of them are forwarded.
        whole: whether all nodes are forwarded anyway.
        slots: ``(batch, tokens)`` place of each node in the step's block of the KV cache; None if
            it is the node's index.
        source: trees with the same nodes, whose tensors these share; padding and probes that only
            they have are left out.
    """

    row_sizes: tuple[int, ...]
    row_depths: tuple[int, ...]
    shape: tuple[int, int]
    device: torch.device
    host: HostTree | None = None
    group: ProbeGroup | None = None
    probes: ProbeLayout | None = None
    usable: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    chosen: Tensor | None = None
    q: Tensor | None = None
    ranked: bool = False
    whole: bool = False
    slots: Tensor | None = None
    source: Tree | None = None

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
        parents = np.broadcast_to(np.maximum(np.arange(nodes) - 1, 0), (batch, nodes))
        depths = np.broadcast_to(np.arange(nodes), (batch, nodes))
        host = HostTree(np.ones(depths.shape), parents, depths, np.zeros_like(depths))
        sizes = (nodes - 1,) * batch
        tree = Tree(sizes, sizes, (nodes, 0), tokens.device, host, chosen=tokens)
        # Prompts are chains: too long to be transferred.
        order = torch.arange(nodes, device=tokens.device)
        seen = (order <= order[:, None]).expand(batch, -1, -1)
        return tree.with_tensors(
            tokens, (order - 1).expand(batch, -1), order.expand(batch, -1),
            torch.ones(batch, nodes, dtype=torch.bool, device=tokens.device), seen,
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
        return Tree.of_host(host, [len(row.tokens) - 1 for row in rows], device, ranked=True)

    @staticmethod
    def of_host(
        host: HostTree, sizes: Sequence[int], device: torch.device | str, **fields: Any
    ) -> Tree:
        """Trees that the host knows, with these numbers of draft tokens, and no probes."""
        count = host.tokens.shape[1]
        depths = (host.depths * _real(count, sizes)).max(1).tolist()
        return Tree(tuple(sizes), tuple(depths), (count, 0), torch.device(device), host, **fields)

    @staticmethod
    def of_tensors(tensors: Sequence[Tensor | None], group: ProbeGroup | None = None) -> Tree:
        """Trees that only the device knows, given their :class:`TreeTensors`: of their sizes and
        depths, the host has upper bounds."""
        own = TreeTensors._make([*tensors, None, None][:7])
        most = (own.shape[0] - 1,) * len(own.tokens)
        tree = Tree(most, most, own.shape, own.tokens.device, group=group)
        return tree.with_tensors(*own)

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
    def repacked(packed: Tensor, nodes: int) -> Tensor:
        """:meth:`packed` trees, padded to so many nodes."""
        parents, depths, tokens, log_probs = packed.chunk(4, dim=1)
        more = 0, nodes - parents.shape[1]
        shapes = [pad(part, more) for part in (parents, depths, tokens)]
        return torch.cat([*shapes, pad(log_probs, more, value=-torch.inf)], dim=1)

    @staticmethod
    def unpacked(packed: Tensor, numbers: np.ndarray | None = None) -> Tree:
        """Inverse of :meth:`packed`; ``numbers``: the same on the host, None to transfer it."""
        if numbers is None:
            numbers = packed.cpu().numpy()
        parts = numbers.reshape(len(numbers), 4, -1).swapaxes(0, 1)
        probs = np.exp(parts[3].astype(np.float64))
        parents, depths, tokens = parts[:3].astype(np.int64)
        real = probs > 0
        host = HostTree(probs, np.maximum(parents, 0) * real, depths, tokens)
        sizes = (real.sum(1) - 1).tolist()
        return Tree.of_host(host, sizes, packed.device, ranked=True)

    # -- shape -------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Number of rows of the batch."""
        return len(self.row_sizes)

    @property
    def num_nodes(self) -> int:
        """Root, draft tokens and probes, padding included."""
        return sum(self.shape)

    @property
    def num_tokens(self) -> int:
        """Root and draft tokens, padding included."""
        return self.shape[0]

    @property
    def num_probes(self) -> int:
        """Probes, padding included."""
        return self.shape[1]

    @property
    def max_depth(self) -> int:
        """Depth of the deepest draft token."""
        return max(self.row_depths)

    @property
    def is_ragged(self) -> bool:
        """Whether much of it is padding of rows with fewer nodes than others."""
        real = self.batch_size + sum(self.row_sizes)
        return not self.num_probes and real <= RAGGED * self.batch_size * self.num_tokens

    def ragged(self) -> Ragged:
        """Its nodes without padding; the trees have no probes."""
        lengths = [1 + size for size in self.row_sizes]
        return Ragged.of(lengths, self.num_tokens, self.device)

    @property
    def is_chain(self) -> bool:
        """Whether every row is known to be a chain."""
        return self.host is not None and self.row_depths == self.row_sizes

    @property
    def is_of_rows(self) -> bool:
        """Whether the trees are what the host knows of them, with probabilities, as
        :meth:`of_rows` makes them."""
        known = self.host is not None and self.ranked and self.chosen is None
        return known and self.q is None and self.probes is None

    # -- what the device has -----------------------------------------------------------------

    @cached_property
    def tensors(self) -> TreeTensors:
        """What the device needs, made and transferred when it is first asked for."""
        source, chosen = self.source, self.chosen
        if source is None:
            made = self._uploaded()
        else:
            made = source.tensors.cut(*self.shape)
            if self.usable is not source.usable:
                made = made._replace(valid=to_device(self._valid(), self.device))
        if chosen is None:
            return made
        if chosen.shape[1] < self.num_nodes:
            chosen = torch.cat([chosen, made.tokens[:, chosen.shape[1] :]], 1)
        return TreeTensors(chosen, *made[1:])

    def _uploaded(self) -> TreeTensors:
        """Those of trees that the host knows, by one transfer."""
        host, probes, group, (nodes, _) = self.host, self.probes, self.group, self.shape
        assert host is not None
        batch, count = host.tokens.shape
        real = _real(count, self.row_sizes)
        whole = np.zeros((3, batch, self.num_nodes), np.int64)  # tokens, parents and depths
        tokens, parents, depths = whole[:, :, :count]
        tokens[:], parents[:], depths[:] = host.tokens, host.parents * real, 1
        np.copyto(depths, host.depths, where=real)
        parents[:, 0] = -1
        parts = [whole, self._valid(), self._seen()]
        if probes is not None and group is not None:
            end, deep = nodes + probes.kinds.shape[1], probes.depths(whole[2], group)
            whole[:, :, nodes:end] = probes.kinds, probes.nodes, deep
            places = np.zeros((2, batch, nodes), np.int64)
            places[:, :, :count] = probes.first, probes.counts
            parts.insert(1, places)
        made, *others, valid, seen = all_to_device(parts, self.device)
        first, counts = others[0] if others else (None, None)
        return TreeTensors._make([*made, valid, seen, first, counts])

    def _valid(self) -> Any:
        assert self.host is not None
        batch, count = self.host.tokens.shape
        valid, real = np.zeros((batch, self.num_nodes), bool), _real(count, self.row_sizes)
        valid[:, :count] = real if self.usable is None else real & self.usable
        if self.probes is not None:
            nodes = self.num_tokens
            valid[:, nodes : nodes + self.probes.real.shape[1]] = self.probes.real
        return valid

    def _seen(self) -> Any:
        """What nodes see. Padding has no ancestors; that of probes sees what the root sees."""
        host, probes, group, (nodes, _) = self.host, self.probes, self.group, self.shape
        assert host is not None
        batch, count = host.parents.shape
        seen = np.zeros((batch, self.num_nodes, self.num_nodes), bool)
        row, own = np.arange(batch)[:, None], np.arange(count)
        above = np.where(host.probs > 0, host.parents, own)
        itself = seen.reshape(batch, -1)[:, :: self.num_nodes + 1]
        itself[:], node = True, above
        for _ in range(self.max_depth):
            seen[row, own, node] = True
            node = above[row, node]
        if probes is not None and group is not None:
            end = nodes + probes.kinds.shape[1]
            seen[:, nodes:end] = seen[row, probes.nodes]
            seen[:, nodes:end, nodes:end] = probes.visible(group)
            itself[:] = True
        return seen

    def with_tensors(self, *tensors: Tensor | None) -> Self:
        """Set :attr:`tensors`, which are known; returns the tree."""
        vars(self)["tensors"] = TreeTensors._make([*tensors, None, None][:7])
        return self

    @property
    def tokens(self) -> Tensor:
        """``(batch, nodes)`` int64 token ids; of a probe, the index of its embedding."""
        return self.tensors.tokens

    @property
    def parents(self) -> Tensor:
        """``(batch, nodes)`` int64; -1 for the root, 0 for padding; of a probe, its node."""
        return self.tensors.parents

    @property
    def depths(self) -> Tensor:
        """``(batch, nodes)`` int64 positions after the root."""
        return self.tensors.depths

    @property
    def valid(self) -> Tensor:
        """``(batch, nodes)`` bool; False for padding and for what must not be accepted."""
        return self.tensors.valid

    @property
    def ancestors(self) -> Tensor:
        """``(batch, nodes, nodes)`` bool; ``[b, q, k]``: q sees k."""
        return self.tensors.ancestors

    @property
    def first_probe(self) -> Tensor | None:
        """``(batch, tokens)`` index of the first probe of each node with a token; None without."""
        return self.tensors.first_probe

    @property
    def probe_counts(self) -> Tensor | None:
        """``(batch, tokens)`` how many probes each of them has; None without."""
        return self.tensors.probe_counts

    @property
    def without_probes(self) -> Tree:
        """The trees without probes."""
        return self if self.group is None else self._without_probes

    @cached_property
    def _without_probes(self) -> Tree:
        shape = self.num_tokens, 0
        tree = dataclasses.replace(self, shape=shape, group=None, probes=None)
        return tree.with_tensors(*self.tensors.cut(*shape))

    def probes_of(self, nodes: Tensor) -> Tensor:
        """``(batch, len(group))`` indices, among all nodes, of the probes of one node ``(batch,)``
        per row; entries past the size of the node's group are arbitrary."""
        assert self.group is not None and self.first_probe is not None
        steps = torch.arange(len(self.group), device=nodes.device)
        index = self.first_probe.gather(1, nodes[:, None]) + steps
        return self.num_tokens + index.clamp(max=self.num_probes - 1)

    # -- changes -----------------------------------------------------------------------------

    def changed(self, **fields: Any) -> Self:
        """A copy with other fields, but the same tensors, or with other tensors, of which the host
        knows nothing."""
        own = {name: fields.pop(name) for name in TreeTensors._fields if name in fields}
        if own:
            tree = dataclasses.replace(self, host=None, **fields)
            return tree.with_tensors(*self.tensors._replace(**own))
        tree = dataclasses.replace(self, **fields)
        return tree.with_tensors(*self.tensors) if self._is_made else tree

    @property
    def _is_made(self) -> bool:
        return "tensors" in vars(self)

    def with_tokens(self, tokens: Tensor, q: Tensor | None = None) -> Tree:
        """The trees with these tokens ``(batch, tokens)`` in place of those of their nodes.

        Trees without tokens may be kept from step to step: what the device has of them is shared.
        """
        source, chosen = self.source or self, tokens.to(self.device)
        return dataclasses.replace(self, chosen=chosen, q=q, ranked=False, source=source)

    def without(self, tokens: Sequence[int]) -> Tree:
        """The trees in which draft tokens of these ids cannot be accepted, for verification."""
        unwanted = to_device(tokens, self.device)
        found = torch.isin(self.tokens, unwanted)
        found[:, 0] = False
        found[:, self.num_tokens :] = False  # probes, whose tokens are indices
        return self.changed(valid=self.valid & ~found)

    def within(self, depths: Sequence[int]) -> Tree:
        """The trees in which draft tokens deeper than this, per row, cannot be accepted."""
        if self.max_depth <= min(depths):
            return self
        assert self.host is not None
        usable = self.host.depths <= np.array(depths)[:, None]
        if self.usable is not None:
            usable &= self.usable
        source = self if self._is_made else self.source
        return dataclasses.replace(self, usable=usable, source=source)

    def likeliest(self, counts: Sequence[int]) -> Tree:
        """So many of the likeliest draft tokens of each row of ranked trees without probes."""
        sizes = [min(size, count) for size, count in zip(self.row_sizes, counts)]
        nodes, host = max(sizes) + 1, self.host
        if nodes >= self.num_nodes and sizes == [*self.row_sizes]:
            return self
        assert host is not None
        host = HostTree(*(part[:, :nodes] for part in host))
        real = _real(nodes, sizes)
        host = host._replace(probs=host.probs * real, parents=host.parents * real)
        usable = None if self.usable is None else self.usable[:, :nodes]
        return Tree.of_host(host, sizes, self.device, usable=usable, ranked=True)

    def attach_probes(
        self, group: ProbeGroup, counts: Sequence[Sequence[int]] | None = None,
        shared: bool = False,
    ) -> Tree:  # fmt: skip
        """The trees with probes of a group: so many of the first ones under each node of each
        row's tree as ``counts`` has, or all of them. ``shared``: all nodes have those of the root,
        a node of depth d without the first d."""
        host, nodes = self.host, self.num_tokens
        assert host is not None
        counts = [[len(group)] * nodes] * self.batch_size if counts is None else counts
        probes = ProbeLayout.of([[*row, *[0] * (nodes - len(row))] for row in counts])
        if shared:
            own = np.where(host.probs > 0, host.depths, 1)
            probes = probes._replace(first=own, counts=probes.counts[:, :1] - own)
        shape = nodes, probes.kinds.shape[1]
        return dataclasses.replace(self, shape=shape, group=group, probes=probes, source=None)

    # -- for compiled code -------------------------------------------------------------------

    def padded(self, tokens: int, probes: int) -> Tree:
        """The trees padded to these numbers of nodes with tokens, and of probes."""
        shape, source = (tokens, probes), self.source
        if shape == self.shape:
            return self
        if source is not None and source.shape == self.shape:
            return dataclasses.replace(self, shape=shape, source=source.padded(*shape))
        found: dict[tuple[int, int], Tree] = vars(self).setdefault("_padded", {})
        if shape not in found:
            wider = dataclasses.replace(self, shape=shape, source=None)
            if self._is_made and self.group is None:  # the device may be all that knows them
                wider.with_tensors(*self.tensors.padded(tokens))
            found[shape] = wider
        return found[shape]

    def part_of(self, padded: Tree) -> Tree:
        """The same trees, sharing what the device has of the :meth:`padded` ones, unless it has
        their own."""
        known = self._is_made or self.source is not None or padded is self
        return self if known else dataclasses.replace(self, source=padded)


@lru_cache(maxsize=256)
def _of_shapes(shapes: tuple[TokenTree, ...], device: str) -> Tree:
    sizes = [shape.num_draft_tokens for shape in shapes]
    parents = np.maximum(filled([shape.parents for shape in shapes]), 0)
    depths = np.array(filled([shape.depths for shape in shapes]))
    real = _real(parents.shape[1], sizes)
    host = HostTree(real.astype(float), parents, depths, np.zeros_like(parents))
    tree = Tree.of_host(host, sizes, device)
    return tree.with_tensors(*tree.tensors)  # before recorded code asks for them


def _real(nodes: int, sizes: Sequence[int]) -> Any:
    """``(batch, nodes)`` bool, False for padding, given each row's number of draft tokens."""
    return np.arange(nodes) <= np.array(sizes)[:, None]


def filled(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Rows of one length, with zeros behind the shorter ones."""
    most = max(map(len, rows))
    return [[*row, *[0] * (most - len(row))] for row in rows]


# -- Attention masks: that of a tree, and what else limits attention, to be joined by `&` ----------
#
# Each but that of :func:`packed_mask` is ``(batch, 1, query, key)`` bool, True = attend. Keys are
# slots of the cache, whose row ``r`` holds ``lengths[r]`` accepted tokens followed by the nodes of
# the tree; that of a layer with a window holds the last of them, in a ring.


def ring_places(ends: Tensor, slots: int) -> Tensor:
    """Which token is in each slot of a ring that holds a row's last ones, ``(batch, slots)``.

    Token ``i`` is written to slot ``i % slots``. Where a ring has not come round yet, and in one
    that never does, slot ``i`` is token ``i``'s, written or not.

    Args:
        ends: ``(batch,)`` tokens, and nodes behind them, that have a slot.
        slots: of each row.
    """
    own = torch.arange(slots, device=ends.device)
    rounds = (ends[:, None] - 1 - own).div(slots, rounding_mode="floor")
    return own + rounds.clamp(min=0) * slots


def tree_mask(ancestors: Tensor, lengths: Tensor, held: Tensor) -> Tensor:
    """The mask of a tree's nodes: each sees its row's prefix, itself and its ancestors.

    Args:
        ancestors: ``(batch, query, nodes)`` bool.
        lengths: ``(batch,)`` tokens of the prefix; node ``i`` is token ``lengths[row] + i``.
        held: ``(batch or 1, keys)`` the token in each slot.

    Returns:
        ``(batch, 1, query, keys)`` bool, True = attend.
    """
    count, nodes = ancestors.shape[1:]
    # A column for the prefix, one for each node and one for what is behind them.
    seen = pad(pad(ancestors, (1, 0), value=True), (0, 1))
    column = (held + 1 - lengths[:, None]).clamp(0, nodes + 1)[:, None].expand(-1, count, -1)
    return seen.gather(2, column)[:, None]


def packed_mask(
    ancestors: Tensor, lengths: Tensor, begin: Tensor | None = None, front: Tensor | None = None
) -> Tensor:
    """The mask of a tree's nodes in the few numbers that
    :func:`hf_spec.modeling_patches.attention_masks.unpacked` reads.

    Args:
        ancestors, lengths: as for :func:`tree_mask`.
        begin: ``(batch, query)`` the first slot of the prefix that each sees; None: all.
        front: ``(batch, query, slots)`` bool, what each sees of slots before the prefix, which
            ``begin`` and ``lengths`` do not count; None if there are none.

    Returns:
        ``(batch, 1, query, numbers)`` int64.
    """
    front = ancestors[:, :, :0] if front is None else front
    count = front.shape[2]
    end = (lengths + count)[:, None].expand(ancestors.shape[:2])
    low = torch.zeros_like(end) if begin is None else begin.clamp(min=0)
    numbers = [low + count, end]
    for seen, base in ((front, torch.zeros_like(end)), (ancestors, end)):
        for first in range(0, seen.shape[2], 64):
            word = seen[:, :, first : first + 64].long()
            bits = word << torch.arange(word.shape[2], device=word.device)
            numbers += [base + first, bits.sum(2)]
    return torch.stack(numbers, dim=2)[:, None]


def since(begin: Tensor, keys: Tensor) -> Tensor:
    """Keys that do not come before a query's first one, as in attention to a sliding window or a
    chunk; both are token positions, ``(batch, query)`` and ``(batch, key)``."""
    return keys[:, None, None] >= begin[:, None, :, None]
