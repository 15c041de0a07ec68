"""Static trees of draft tokens, as options and files give them. This module knows only shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from hf_spec.core.limits import MAX_DRAFT_TOKENS, MAX_NODES
from hf_spec.threads import cached_property


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
        raise ValueError(f"a tree with more than {MAX_DRAFT_TOKENS} draft tokens: leave some out.")
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
