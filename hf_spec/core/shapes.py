"""Trees on the host: shapes of static ones, groups of probes, which tree each state of a step gets,
and the draft trees of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from hf_spec.core.checks import MAX_DRAFT_TOKENS, MAX_FUTURE, MAX_NODES, MAX_ROWS
from hf_spec.threads import cached_property

# --------------------------------------------------------------------------------------------------
# Static trees of draft tokens, as options and files give them.


@dataclass(frozen=True)
class TokenTree:
    """A static tree of draft tokens.

    Args:
        parents: parent of each node; ``parents[0] == -1`` is the root, and ``parents[i] < i``.
        ranks: rank of each node among its parent's draft tokens (0 = most likely); the root's is 0.
            If omitted, siblings are ranked in order.

    Raises:
        ValueError: if a parent does not precede its child, two siblings share a rank, or there
            are too many nodes.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parents = tuple(self.parents)
        if len(parents) > MAX_NODES:
            raise ValueError(f"{len(parents)} nodes: a tree has at most {MAX_NODES}. Give fewer.")
        if not parents or parents[0] != -1:
            raise ValueError(
                f"parents={parents[:8]}: a tree starts with its root, so parents[0] must be -1."
            )
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"parents[{node}]={parent}: a parent stands before its child, so it must lie "
                    f"in 0..{node - 1}. Order the nodes parents first."
                )
        ranks = tuple(self.ranks) or _sibling_order(parents)
        if len(ranks) != len(parents):
            raise ValueError(f"{len(ranks)} ranks for {len(parents)} nodes: give one per node.")
        seen = set()
        for node in range(1, len(parents)):
            if ranks[node] < 0:
                raise ValueError(f"ranks[{node}]={ranks[node]}: ranks count from 0.")
            if (key := (parents[node], ranks[node])) in seen:
                raise ValueError(f"node {node}: node {key[0]} has two children of rank {key[1]}.")
            seen.add(key)
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "ranks", ranks)

    # -- construction ------------------------------------------------------------------------

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> TokenTree:
        """Build a tree from rank paths, as in Medusa's choices: ``[0]`` is the likeliest child of
        the root, ``[0, 1]`` that node's second likeliest child.

        Args:
            paths: one path per draft token, in any order; every nonempty prefix must be a path.

        Raises:
            ValueError: on an empty path, a negative rank, a duplicate, a missing parent, or too
                many paths.
        """
        return cls.in_order(sorted(_checked_paths(paths), key=lambda key: (len(key), key)))

    @classmethod
    def in_order(cls, paths: Iterable[Sequence[int]]) -> TokenTree:
        """Like :meth:`from_paths`, with the nodes in the order of the paths.

        Raises:
            ValueError: as :meth:`from_paths`, and if a path precedes its parent.
        """
        index: dict[tuple[int, ...], int] = {(): 0}
        parents, ranks = [-1], [0]
        for key in _checked_paths(paths):
            if key in index:
                raise ValueError(f"path {list(key)} is given twice.")
            if key[:-1] not in index:
                raise ValueError(
                    f"path {list(key)}: its parent {list(key[:-1])} is missing. Add it, since a "
                    "draft token can only be accepted after its parent."
                )
            index[key] = len(parents)
            parents.append(index[key[:-1]])
            ranks.append(key[-1])
        return cls(tuple(parents), tuple(ranks))

    @staticmethod
    @lru_cache(maxsize=512)
    def chain(length: int) -> TokenTree:
        """The root and ``length`` draft tokens, each the child of the one before."""
        return TokenTree(tuple(range(-1, length)))

    # -- shape -------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @property
    def num_draft_tokens(self) -> int:
        """Nodes besides the root."""
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 0 for the root."""
        return tuple(depths_of(self.parents))

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 for the root alone."""
        return max(self.depths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Rank path of each draft token, without the root's empty path."""
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(self.parents)):
            paths.append((*paths[self.parents[node]], self.ranks[node]))
        return tuple(paths[1:])

    def truncate(self, max_depth: int) -> TokenTree:
        """The tree of the nodes with ``depth <= max_depth``, in the same order.

        :meth:`kept` gives their indices.
        """
        return self if max_depth >= self.max_depth else _truncate(self, max_depth)

    def kept(self, max_depth: int) -> list[int]:
        """Indices of the nodes that :meth:`truncate` keeps, in order."""
        return [node for node, depth in enumerate(self.depths) if depth <= max_depth]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each node, 0 for the root, which is the first one."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def _checked_paths(paths: Any) -> list[tuple[int, ...]]:
    """Return rank paths as tuples; raise a ValueError if they are invalid."""
    found = list(islice(paths, MAX_DRAFT_TOKENS + 1))
    if len(found) > MAX_DRAFT_TOKENS:
        raise ValueError(f"more than {MAX_DRAFT_TOKENS} draft tokens: leave some out.")
    return [_checked_path(path) for path in found]


def _checked_path(path: Any) -> tuple[int, ...]:
    if isinstance(path, str) or not isinstance(path, Iterable):
        raise ValueError(f"path {path!r}: give a list of ranks.")
    key = tuple(islice(path, MAX_DRAFT_TOKENS + 1))
    if len(key) > MAX_DRAFT_TOKENS:
        raise ValueError(f"path {list(key[:8])} ...: at most {MAX_DRAFT_TOKENS} ranks.")
    if not key:
        raise ValueError("path []: the root is implied; give paths of draft tokens only.")
    for rank in key:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise ValueError(f"path {list(key)}: ranks are whole numbers, {rank!r} is not.")
    if min(key) < 0:
        raise ValueError(f"path {list(key)}: ranks count from 0.")
    return key


def _sibling_order(parents: tuple[int, ...]) -> tuple[int, ...]:
    counts: dict[int, int] = {}
    ranks = [0]
    for parent in parents[1:]:
        ranks.append(counts.get(parent, 0))
        counts[parent] = ranks[-1] + 1
    return tuple(ranks)


@lru_cache(maxsize=512)
def _truncate(tree: TokenTree, max_depth: int) -> TokenTree:
    kept = tree.kept(max_depth)
    new = {old: index for index, old in enumerate(kept)}
    parents = tuple(new.get(tree.parents[node], -1) for node in kept)
    return TokenTree(parents, tuple(tree.ranks[node] for node in kept))


# -- Groups of probes: nodes with a learned embedding that ask the model for a future token --------
#
# BiTA's and SPACE's mask tokens and PPD's prompt tokens are probes. A *group* of probes is attached
# to a node of the tree (:meth:`hf_spec.core.tree.Tree.attach_probes`). A probe sees what the node
# sees, and some probes of its own group; only its group sees a probe.


@dataclass(frozen=True)
class ProbeGroup:
    """The probes of one node; probe ``i`` carries the ``i``-th learned embedding.

    Args:
        offsets: positions after the node, from 1; a probe at offset d predicts the token at d + 1.
        visible: ``visible[q][k]``: probe q attends to probe k of its group, and to itself.
    """

    offsets: tuple[int, ...]
    visible: tuple[tuple[bool, ...], ...]

    def __len__(self) -> int:
        return len(self.offsets)

    @staticmethod
    @lru_cache(maxsize=64)
    def causal(size: int) -> ProbeGroup:
        """One probe per offset 1 .. ``size``, each seeing those before it."""
        rows = tuple(tuple(k <= q for k in range(size)) for q in range(size))
        return ProbeGroup(tuple(range(1, size + 1)), rows)


class ProbeLayout(NamedTuple):
    """Where the probes of a batch's trees are, as int64 NumPy arrays on the host.

    Attributes:
        kinds: ``(batch, probes)`` index of each one in the group; 0 for padding, as below.
        nodes: ``(batch, probes)`` the node that it is under.
        real: ``(batch, probes)`` bool; False for padding.
        first: ``(batch, nodes)`` index of each node's first probe.
        counts: ``(batch, nodes)`` how many it has.
    """

    kinds: Any
    nodes: Any
    real: Any
    first: Any
    counts: Any

    @classmethod
    def of(cls, counts: Sequence[Sequence[int]]) -> ProbeLayout:
        """So many of the first probes under each node of each row."""
        count = np.array(counts)
        end = count.cumsum(1)
        first, places = end - count, np.arange(end[:, -1].max())
        real = places < end[:, -1:]
        # A probe belongs to the first node whose probes end after it.
        nodes = (end[:, None] <= places[:, None]).sum(2) * real
        kinds = (places - np.take_along_axis(first, nodes, 1)) * real
        return cls(kinds, nodes, real, first, count)

    def depths(self, depths: Any, group: ProbeGroup) -> Any:
        """``(batch, probes)`` depths, given those of the nodes."""
        return np.take_along_axis(depths, self.nodes, 1) + np.array(group.offsets)[self.kinds]

    def visible(self, group: ProbeGroup) -> Any:
        """``(batch, probes, probes)`` bool: whether the first probe sees the second one, which is
        under the same node. Padding sees itself."""
        under = np.where(self.real, self.nodes, -1 - np.arange(self.real.shape[1]))
        same = under[:, :, None] == under[:, None]
        return same & np.array(group.visible)[self.kinds[:, :, None], self.kinds[:, None]]


# -- Trees that depend on how many future tokens the last step predicted (PPD, section 5.4) --------
#
# Each probe under the last accepted node predicts one future token; their number is the **state**
# of a batch row. This module knows only shapes.


@dataclass(frozen=True)
class TreeState:
    """The tree and probes that a batch row forwards in one state.

    Args:
        tree: the draft tokens.
        probes: distances probed under each node: n predicts n tokens after the next one.

    Raises:
        ValueError: unless there is one int >= 0 for each node, or if there are too many probes.
    """

    tree: TokenTree
    probes: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = tuple(self.probes)
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts)
        if not whole or len(counts) != len(self.tree):
            raise ValueError(
                f"probes={list(counts)[:8]} for {len(self.tree)} nodes: give each node, the root "
                "first, its number of probes, from 0."
            )
        object.__setattr__(self, "probes", counts)
        if self.num_rows() > MAX_ROWS:
            raise ValueError(
                f"{len(counts)} nodes with {sum(counts)} probes: a step has at most {MAX_ROWS} of "
                "both. Give fewer."
            )

    def num_rows(self, per_distance: int = 1) -> int:
        """Number of nodes and probes, with ``per_distance`` probes for each distance."""
        return len(self.tree) + per_distance * sum(self.probes)

    def truncate(self, max_depth: int) -> TreeState:
        """The state without the nodes deeper than ``max_depth`` and their probes."""
        return self if max_depth >= self.tree.max_depth else _truncated(self, max_depth)


@dataclass(frozen=True)
class TreeStates:
    """A dynamic tree: ``states[k]`` is used after k future tokens were predicted.

    Args:
        states: the states 0 to m; in state 0 nothing is predicted and the tree is just the root.

    Raises:
        ValueError: if a state's tree is deeper than its number, or a node has more than m probes.
    """

    states: tuple[TreeState, ...]

    def __post_init__(self) -> None:
        states = tuple(self.states)
        most = len(states) - 1
        if not 0 <= most <= MAX_FUTURE:
            raise ValueError(
                f"{len(states)} states: a dynamic tree has state 0, the root alone, and at most "
                f"{MAX_FUTURE} more."
            )
        for k, state in enumerate(states):
            if state.tree.max_depth > k:
                raise ValueError(
                    f"state {k} has draft tokens at depth {state.tree.max_depth}: {k} future "
                    "tokens are known in it."
                )
            if max(state.probes) > most:
                raise ValueError(
                    f"state {k} has a node with {max(state.probes)} probes: there are states up "
                    f"to {most}."
                )
        object.__setattr__(self, "states", states)

    @staticmethod
    @lru_cache(maxsize=512)
    def uniform(tree: TokenTree, depth: int, probed: bool = True) -> TreeStates:
        """The same tree in every state, of which at most ``depth`` future tokens are predicted.

        Args:
            probed: whether each node has probes for them; else something else predicts them.
        """
        trees = [tree.truncate(k) for k in range(depth + 1)]
        return TreeStates(tuple(TreeState(one, (depth * probed,) * len(one)) for one in trees))

    @property
    def max_probes(self) -> int:
        """m, the largest number of predicted future tokens and of distances under a node."""
        return len(self.states) - 1

    @property
    def max_rank(self) -> int:
        """Largest rank of a draft token."""
        return max(max(state.tree.ranks) for state in self.states)


@lru_cache(maxsize=512)
def _truncated(state: TreeState, max_depth: int) -> TreeState:
    kept = state.tree.kept(max_depth)
    return TreeState(state.tree.truncate(max_depth), tuple(state.probes[node] for node in kept))


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

    @property
    def below(self) -> list[list[int]]:
        """The children of each node."""
        found: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], 1):
            found[parent].append(node)
        return found

    @property
    def end(self) -> int:
        """Where the likeliest path ends: from the root on, always the likeliest child."""
        node, below = 0, self.below
        while children := below[node]:
            node = max(children, key=self.probs.__getitem__)
        return node

    def add(self, parent: int, token: int, prob: float) -> None:
        """Add a node, which comes last."""
        self.parents.append(parent)
        self.tokens.append(token)
        self.probs.append(prob)

    def nodes_to(self, node: int) -> list[int]:
        """The nodes down to one, without the root."""
        found = []
        while node:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def path(self, node: int) -> list[int]:
        """The draft tokens down to a node."""
        return [self.tokens[one] for one in self.nodes_to(node)]

    def merge(self, other: Row, at: int = 0) -> Row:
        """Both trees as one: nodes with the same token path become one, which keeps the larger
        probability. The nodes of this tree keep their indices.

        Args:
            at: the node of this tree that the other one's root stands for.
        """
        parents, tokens, probs = list(self.parents), list(self.tokens), list(self.probs)
        child, index, reached = self.children, [at], self.probs[at]
        for parent, token, prob in zip(other.parents[1:], other.tokens[1:], other.probs[1:]):
            prob *= reached
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

    def likeliest_first(self, most: int | None = None) -> Row:
        """The nodes sorted by probability, at most so many; draft tokens of probability 0 are left
        out."""
        order = sorted(range(len(self.parents)), key=lambda node: -self.probs[node])
        order = [node for node in order if self.probs[node] > 0][:most]
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

    def rows(self, sizes: Sequence[int]) -> list[Row]:
        """Each row's tree, given its number of draft tokens."""
        columns = self.parents.tolist(), self.tokens.tolist(), self.probs.tolist()
        return [
            Row([-1, *parents[1 : size + 1]], tokens[: size + 1], probs[: size + 1])
            for parents, tokens, probs, size in zip(*columns, sizes)
        ]
