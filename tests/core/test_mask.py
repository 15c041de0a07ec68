"""Masks equal a double loop over queries and keys."""

import random

import pytest
import torch
from random_trees import path_to, random_tree

from hf_spec.core.tree import Tree, since, tree_mask


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

    positions = [
        [k if k < n else n + int(tree.depths[b, min(k - n, nodes - 1)]) for k in range(keys)]
        for b, n in enumerate(lengths)
    ]

    def rule(b: int, q: int, k: int) -> bool:
        node, key = first + q, k - lengths[b]
        own = path_to(trees[b].parents, node) if node < len(trees[b]) else [node]  # padding
        visible = key < 0 or key in own
        position = lengths[b] + int(tree.depths[b, node])
        return visible and (window is None or position - positions[b][k] < window)

    shape = (len(trees), nodes - first, keys)
    built = tree_mask(tree.ancestors[:, first:], on_device, torch.arange(keys)[None])
    if window is not None:
        query_positions = on_device[:, None] + tree.depths[:, first:]
        built = built & since(query_positions - window + 1, torch.tensor(positions))
    expected = [
        [[rule(b, q, k) for k in range(shape[2])] for q in range(shape[1])] for b in range(shape[0])
    ]
    assert built.dtype == torch.bool
    assert built[:, 0].tolist() == expected
