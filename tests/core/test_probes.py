"""Probes stand where they should: their depths, embeddings and the groups of nodes."""

import pytest
import torch
from random_trees import GROUPS

from hf_spec.core.probes import ProbeGroup
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree

SHAPE = TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
OTHER = TokenTree.chain(2)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_some_probes_of_some_nodes_of_different_trees(group: ProbeGroup) -> None:
    counts = [[3, 0, 1, 2, 0, 0, 3], [1, 0, 2]]
    tree = Tree.of_shapes([SHAPE, OTHER]).attach_probes(group, counts)
    nodes = len(SHAPE)
    assert (tree.num_tokens, tree.num_probes) == (nodes, 9)
    for row, (shape, own) in enumerate(zip((SHAPE, OTHER), counts)):
        probes = [(node, kind) for node, count in enumerate(own) for kind in range(count)]
        real = range(nodes, nodes + len(probes))
        assert tree.parents[row, real].tolist() == [node for node, _ in probes]
        assert tree.tokens[row, real].tolist() == [kind for _, kind in probes]
        depths = [shape.depths[node] + group.offsets[kind] for node, kind in probes]
        assert tree.depths[row, real].tolist() == depths
        assert tree.valid[row, nodes:].tolist() == [probe < len(probes) for probe in range(9)]
        for node, count in enumerate(own):
            at = tree.probes_of(torch.full((2,), node))[row, :count]
            assert [probes[n - nodes] for n in at.tolist()] == [(node, k) for k in range(count)]
