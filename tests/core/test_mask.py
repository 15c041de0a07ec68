"""Masks made from predicates equal a double loop over queries and keys."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from random_trees import path_to, random_tree
from torch import Tensor

from hf_spec.core import mask as masks
from hf_spec.core.tree import Tree


def double_loop(
    batch: int, queries: int, keys: int, rule: Callable[[int, int, int], bool]
) -> Tensor:
    table = [[[rule(b, q, k) for k in range(keys)] for q in range(queries)] for b in range(batch)]
    return torch.tensor(table, dtype=torch.bool).reshape(batch, queries, keys)[:, None]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
def test_tree_mask_equals_the_double_loop(seed: int, window: int | None) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng, rng.randint(1, 7)) for _ in range(rng.randint(1, 4))]
    lengths = [rng.randint(0, 9) for _ in trees]
    tree = Tree.of_shapes(trees)
    nodes = tree.num_nodes
    first = rng.randrange(nodes)  # nodes before it were forwarded earlier in the step
    keys = max(lengths) + nodes + rng.randint(0, 4)
    on_device = torch.tensor(lengths)

    predicate = masks.or_(
        masks.prefix(on_device), masks.tree_ancestors(tree.ancestors[:, first:], on_device)
    )
    positions = [
        [k if k < n else n + int(tree.depths[b, min(k - n, nodes - 1)]) for k in range(keys)]
        for b, n in enumerate(lengths)
    ]
    if window is not None:
        query_positions = on_device[:, None] + tree.depths[:, first:]
        near = masks.window(window, query_positions, torch.tensor(positions))
        predicate = masks.and_(predicate, near)

    def rule(b: int, q: int, k: int) -> bool:
        node, key = first + q, k - lengths[b]
        own = path_to(trees[b].parents, node) if node < len(trees[b]) else [node]  # padding
        visible = key < 0 or key in own
        position = lengths[b] + int(tree.depths[b, node])
        return visible and (window is None or position - positions[b][k] < window)

    shape = (len(trees), nodes - first, keys)
    built = masks.build(predicate, *shape, torch.device("cpu"))
    assert built.dtype == torch.bool
    assert torch.equal(built, double_loop(*shape, rule))


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_a_chunk_equals_the_double_loop(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    queries, keys = (torch.randint(12, (2, n), generator=generator) for n in (4, 9))
    built = masks.build(masks.chunk(size, queries, keys), 2, 4, 9, torch.device("cpu"))

    def rule(b: int, q: int, k: int) -> bool:
        return int(queries[b, q]) // size == int(keys[b, k]) // size

    assert torch.equal(built, double_loop(2, 4, 9, rule))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_and_is_all_and_or_is_any(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tables = torch.rand(count, 2, 3, 4, generator=generator) < 0.5

    def predicate(table: Tensor) -> masks.Predicate:
        return lambda row, query, slot: table[row, query, slot]

    predicates = [predicate(table) for table in tables]
    every = masks.build(masks.and_(*predicates), 2, 3, 4, "cpu")
    some = masks.build(masks.or_(*predicates), 2, 3, 4, "cpu")
    assert torch.equal(
        every, double_loop(2, 3, 4, lambda b, q, k: all(bool(t[b, q, k]) for t in tables))
    )
    assert torch.equal(
        some, double_loop(2, 3, 4, lambda b, q, k: any(bool(t[b, q, k]) for t in tables))
    )
