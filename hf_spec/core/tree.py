"""Trees of candidate tokens.

Node 0 is the **root**: the last accepted token, already certain. Every other node is a candidate
whose parent precedes it, so one pass over the nodes visits parents first. This module knows only
shapes; the tokens of the nodes belong to the draft.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hf_spec.core.limits import MAX_CANDIDATES, MAX_NODES


@dataclass(frozen=True)
class TokenTree:
    """A static tree of candidates.

    Args:
        parents: parent of each node; ``parents[0] == -1`` is the root, and ``parents[i] < i``.
        ranks: rank of each node among its parent's candidates (0 = most likely); the root's is 0.
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
            paths: one path per candidate, in any order; every nonempty prefix must be a path, too.

        Raises:
            ValueError: on an empty path, a negative rank, a duplicate, a missing parent, or too
                many paths.
        """
        return _from_keys(cls, sorted(_checked_paths(paths), key=lambda key: (len(key), key)))

    @classmethod
    def in_order(cls, paths: Iterable[Sequence[int]]) -> TokenTree:
        """Like :meth:`from_paths`, with the nodes in the order of the paths.

        Raises:
            ValueError: as :meth:`from_paths`, and if a path precedes its parent.
        """
        return _from_keys(cls, _checked_paths(paths))

    @staticmethod
    @lru_cache(maxsize=512)
    def chain(length: int) -> TokenTree:
        """The root and ``length`` candidates, each the child of the one before."""
        return TokenTree(tuple(range(-1, length)))

    @classmethod
    def from_parents(cls, parents: Sequence[int]) -> TokenTree:
        """The tree with these parents; equal shapes share one object and its cached tensors."""
        return _from_parents(tuple(parents))

    def to_json(self) -> str:
        """The paths as JSON, for :meth:`from_json`."""
        return json.dumps({"version": 1, "paths": [list(path) for path in self.paths]})

    @classmethod
    def from_json(cls, text: str) -> TokenTree:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: if the text is not JSON with ``version`` 1 and ``paths``.
        """
        form = 'expected {"version": 1, "paths": [[0], [0, 0], ...]}.'
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a tree: {form} It is no JSON: {error}.") from error
        whole = isinstance(data, dict) and "version" in data
        if not whole or not isinstance(data.get("paths"), list):
            raise ValueError(f"not a tree: {form}")
        if data.get("version") != 1:
            raise ValueError(
                f"tree format version {data.get('version')!r}: this hf_spec reads version 1."
            )
        return cls.in_order(data["paths"])

    # -- shape -------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @property
    def num_candidates(self) -> int:
        """Nodes besides the root."""
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 0 for the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 for the root alone."""
        return max(self.depths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Rank path of each candidate, without the root's empty path."""
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(self.parents)):
            paths.append((*paths[self.parents[node]], self.ranks[node]))
        return tuple(paths[1:])

    @cached_property
    def is_chain(self) -> bool:
        """Whether accepted nodes are always in consecutive slots, so that none has to move."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def truncate(self, max_depth: int) -> TokenTree:
        """The tree of the nodes with ``depth <= max_depth``, in the same order.

        :meth:`kept` gives their indices.
        """
        return self if max_depth >= self.max_depth else _truncate(self, max_depth)

    def kept(self, max_depth: int) -> list[int]:
        """Indices of the nodes that :meth:`truncate` keeps, in order."""
        return [node for node, depth in enumerate(self.depths) if depth <= max_depth]

    # -- tensors -----------------------------------------------------------------------------

    def batch(self, batch_size: int = 1, device: torch.device | str = "cpu") -> TreeBatch:
        """The same tree in every row, as tensors on ``device`` (cached per size and device)."""
        return _batch(self, batch_size, str(device))


@dataclass(frozen=True)
class TreeBatch:
    """One tree per batch row, as tensors, padded to the largest.

    Attributes:
        parents: ``(batch, nodes)`` int64; -1 for the root, 0 for padding.
        depths: ``(batch, nodes)`` int64.
        ancestors: ``(batch, nodes, nodes)`` bool; ``[b, q, k]``: k is q or one of its ancestors.
        valid: ``(batch, nodes)`` bool; False for padding. Padding attends to the prefix and to
            itself, and can never be accepted.
        row_depths: depth of each row's tree.
        row_candidates: number of candidates in each row.
        is_chain: whether every row is a chain.
    """

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    valid: Tensor
    row_depths: tuple[int, ...]
    row_candidates: tuple[int, ...]
    is_chain: bool

    @property
    def max_depth(self) -> int:
        return max(self.row_depths)

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    @property
    def batch_size(self) -> int:
        return self.parents.shape[0]

    @cached_property
    def inner(self) -> tuple[Tensor, Tensor]:
        """Nodes with children, ``(batch, inner)`` int64, padded with roots, and for each node the
        index of its parent among them, ``(batch, nodes)``, arbitrary for the root."""
        rows = []
        for parents, count in zip(self.parents.tolist(), self.row_candidates):
            rows.append(sorted({0, *parents[1 : count + 1]}))
        most = max(map(len, rows))
        filled = [row + [0] * (most - len(row)) for row in rows]
        inner = torch.tensor(filled, device=self.parents.device)
        place = torch.zeros_like(self.parents)
        order = torch.arange(most, device=inner.device).expand_as(inner)
        # Ascending, padding last: the padding must not overwrite the root's index, which is 0.
        real = torch.tensor([len(row) for row in rows], device=inner.device)[:, None] > order
        place.scatter_add_(1, inner, order * real)
        return inner, place.gather(1, self.parents.clamp(min=0))

    @staticmethod
    def chain(batch_size: int, nodes: int, device: torch.device | str = "cpu") -> TreeBatch:
        """A chain of ``nodes`` nodes in every row; not cached, as prompts have many lengths."""
        order = torch.arange(nodes, device=device)
        return TreeBatch(
            parents=(order - 1).expand(batch_size, -1),
            depths=order.expand(batch_size, -1),
            ancestors=(order <= order[:, None]).expand(batch_size, -1, -1),
            valid=torch.ones(batch_size, nodes, dtype=torch.bool, device=device),
            row_depths=(nodes - 1,) * batch_size,
            row_candidates=(nodes - 1,) * batch_size,
            is_chain=True,
        )

    @staticmethod
    def of(
        parents: Tensor, depths: Tensor, valid: Tensor, real: Sequence[Sequence[int]]
    ) -> TreeBatch:
        """Trees built on the device.

        Args:
            parents: ``(batch, nodes)`` int64, each before its children; the root's is arbitrary.
            depths: ``(batch, nodes)`` int64.
            valid: ``(batch, nodes)`` bool; a row's nodes come before its padding.
            real: the depths on the host, -1 for padding.
        """
        above = parents.clamp(min=0) * valid
        row_depths = tuple(map(max, real))
        ancestors = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)
        ancestors = ancestors.repeat(len(parents), 1, 1)
        order = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
        up = step = torch.where(valid, above, order)
        for _ in range(max(row_depths)):
            ancestors.scatter_(2, up[:, :, None], True)
            up = step.gather(1, up)
        return TreeBatch(
            parents=above.index_fill(1, above.new_zeros(1), -1),
            depths=torch.where(valid, depths, 1),
            ancestors=ancestors,
            valid=valid,
            row_depths=row_depths,
            row_candidates=tuple(sum(depth > 0 for depth in row) for row in real),
            is_chain=all(depth + 1 == len(real[0]) for depth in row_depths),
        )

    @staticmethod
    def stack(trees: Sequence[TokenTree], device: torch.device | str = "cpu") -> TreeBatch:
        """One tree per row; smaller trees are padded at the end."""
        first = trees[0]
        if all(tree is first for tree in trees):
            return first.batch(len(trees), device)
        nodes = max(len(tree) for tree in trees)
        rows = [_padded(tree, nodes, str(device)) for tree in trees]
        return TreeBatch(
            parents=torch.cat([one.parents for one in rows]),
            depths=torch.cat([one.depths for one in rows]),
            ancestors=torch.cat([one.ancestors for one in rows]),
            valid=torch.cat([one.valid for one in rows]),
            row_depths=tuple(one.row_depths[0] for one in rows),
            row_candidates=tuple(one.row_candidates[0] for one in rows),
            is_chain=all(one.is_chain for one in rows),
        )


def merge(
    first: TokenTree, first_tokens: Sequence[int], second: TokenTree, candidates: Sequence[int]
) -> tuple[TokenTree, list[int], list[int]]:
    """Merge two trees; candidates with the same token path become one node.

    Args:
        first, first_tokens: a tree and the tokens of all its nodes; they keep their indices.
        second, candidates: another tree with the same root, and its candidates' tokens.

    Returns:
        The tree, the tokens of its nodes, and the index of each of the second tree's candidates.
    """
    parents, tokens = list(first.parents), list(first_tokens)
    child = {(parents[node], tokens[node]): node for node in range(len(parents) - 1, 0, -1)}
    places = [0]
    for parent, token in zip(second.parents[1:], candidates):
        key = (places[parent], token)
        if key not in child:
            child[key] = len(parents)
            parents.append(key[0])
            tokens.append(token)
        places.append(child[key])
    return TokenTree.from_parents(parents), tokens, places[1:]


def _checked_paths(paths: Any) -> list[tuple[int, ...]]:
    """Return rank paths as tuples; raise a ValueError if they are invalid."""
    found = list(islice(paths, MAX_CANDIDATES + 1))
    if len(found) > MAX_CANDIDATES:
        raise ValueError(f"a tree with more than {MAX_CANDIDATES} candidates: leave some out.")
    return [_checked_path(path) for path in found]


def _checked_path(path: Any) -> tuple[int, ...]:
    """Return a rank path as a tuple; raise a ValueError if it is invalid."""
    if isinstance(path, str) or not isinstance(path, Iterable):
        raise ValueError(f"path {path!r}: give a list of ranks.")
    key = tuple(islice(path, MAX_CANDIDATES + 1))
    if len(key) > MAX_CANDIDATES:
        raise ValueError(f"path {list(key[:8])} ...: at most {MAX_CANDIDATES} ranks.")
    if not key:
        raise ValueError("path []: the root is implied; give paths of candidates only.")
    for rank in key:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise ValueError(f"path {list(key)}: ranks are whole numbers, {rank!r} is not.")
    if min(key) < 0:
        raise ValueError(f"path {list(key)}: ranks count from 0.")
    return key


def _from_keys(cls: type[TokenTree], keys: Sequence[tuple[int, ...]]) -> TokenTree:
    """The tree whose nodes are these paths, in this order."""
    index: dict[tuple[int, ...], int] = {(): 0}
    parents, ranks = [-1], [0]
    for key in keys:
        if key in index:
            raise ValueError(f"path {list(key)} is given twice.")
        if key[:-1] not in index:
            raise ValueError(
                f"path {list(key)}: its parent {list(key[:-1])} is missing. Add it, since a "
                "candidate can only be accepted after its parent."
            )
        index[key] = len(parents)
        parents.append(index[key[:-1]])
        ranks.append(key[-1])
    return cls(tuple(parents), tuple(ranks))


def _sibling_order(parents: tuple[int, ...]) -> tuple[int, ...]:
    counts: dict[int, int] = {}
    ranks = [0]
    for parent in parents[1:]:
        ranks.append(counts.get(parent, 0))
        counts[parent] = ranks[-1] + 1
    return tuple(ranks)


@lru_cache(maxsize=4096)
def _from_parents(parents: tuple[int, ...]) -> TokenTree:
    return TokenTree(parents)


@lru_cache(maxsize=512)
def _truncate(tree: TokenTree, max_depth: int) -> TokenTree:
    kept = tree.kept(max_depth)
    new = {old: index for index, old in enumerate(kept)}
    parents = tuple(new.get(tree.parents[node], -1) for node in kept)
    return TokenTree(parents, tuple(tree.ranks[node] for node in kept))


@lru_cache(maxsize=1024)
def _batch(tree: TokenTree, batch_size: int, device: str) -> TreeBatch:
    one = _single(tree, device)
    if batch_size == 1:
        return one
    return TreeBatch(
        parents=one.parents.expand(batch_size, -1),
        depths=one.depths.expand(batch_size, -1),
        ancestors=one.ancestors.expand(batch_size, -1, -1),
        valid=one.valid.expand(batch_size, -1),
        row_depths=one.row_depths * batch_size,
        row_candidates=one.row_candidates * batch_size,
        is_chain=one.is_chain,
    )


@lru_cache(maxsize=4096)
def _padded(tree: TokenTree, nodes: int, device: str) -> TreeBatch:
    """One tree padded to ``nodes`` nodes."""
    one, more = _single(tree, device), nodes - len(tree)
    if not more:
        return one
    pad = torch.constant_pad_nd
    ancestors = pad(one.ancestors, (0, more, 0, more))
    ancestors[0].fill_diagonal_(True)
    return dataclasses.replace(
        one, parents=pad(one.parents, (0, more)), depths=pad(one.depths, (0, more), value=1),
        ancestors=ancestors, valid=pad(one.valid, (0, more)),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _single(tree: TokenTree, device: str) -> TreeBatch:
    nodes = len(tree)
    ancestors = torch.zeros(nodes, nodes, dtype=torch.bool, device="cpu")
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            ancestors[node] = ancestors[parent]
        ancestors[node, node] = True
    return TreeBatch(
        parents=torch.tensor([tree.parents], device=device),
        depths=torch.tensor([tree.depths], device=device),
        ancestors=ancestors[None].to(device),
        valid=torch.ones(1, nodes, dtype=torch.bool, device=device),
        row_depths=(tree.max_depth,),
        row_candidates=(tree.num_candidates,),
        is_chain=tree.is_chain,
    )
