"""The nodes that a forward runs over, and their padding for compiled code."""

import random

import pytest
import torch
from random_trees import GROUPS, random_row

from hf_spec.core.tree import Tree
from hf_spec.model.block import Block


def test_tokens_and_probes() -> None:
    tree = Tree.of_rows([random_row(random.Random(0), 5)] * 2, "cpu")
    block = Block.of(tree.attach_probes(GROUPS["causal"]))
    assert torch.equal(block.ids, tree.tokens)
    assert block.kinds.tolist() == [[0, 1, 2] * 5] * 2
    assert block.visible.shape == (2, 20, 20)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("first", range(5))
def test_the_rest_of_a_tree_sees_what_was_forwarded_before(first: int, padded: bool) -> None:
    tree = Tree.of_rows([random_row(random.Random(seed), 7) for seed in range(3)], "cpu")
    if padded:
        block = Block.of(tree.padded(16, 0), first + torch.arange(8))
    else:
        block = Block.of(tree, slice(first, None))
    count = 7 - first
    for name in ("tokens", "depths"):
        assert torch.equal(getattr(block, name)[:, :count], getattr(tree, name)[:, first:])
    assert torch.equal(block.visible[:, :count, :7], tree.ancestors[:, first:])
    assert not block.visible[:, :count, 7:].any()
    for node in range(count, block.tokens.shape[1]):  # padding sees itself
        assert block.visible[:, node].nonzero()[:, 1].tolist() == [first + node] * 3
