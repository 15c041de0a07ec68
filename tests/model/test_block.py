"""The nodes that a forward runs over, and their padding for compiled code."""

from __future__ import annotations

import random

import pytest
import torch
from random_trees import GROUPS, random_row

from hf_spec.core.buckets import bucket
from hf_spec.core.tree import Tree
from hf_spec.model.block import SLOTS, Block


def test_tokens_and_probes() -> None:
    tree = Tree.of_rows([random_row(random.Random(0), 5)] * 2, "cpu")
    block = Block.of(tree.attach_probes(GROUPS["causal"]))
    assert torch.equal(block.ids, tree.tokens)
    assert block.kinds.tolist() == [[0, 1, 2] * 5] * 2
    assert block.visible.shape == (2, 20, 20)


@pytest.mark.parametrize("first", range(5))
def test_the_rest_of_a_tree_sees_what_was_forwarded_before(first: int) -> None:
    rows = [random_row(random.Random(seed), 7) for seed in range(3)]
    tree = Tree.of_rows(rows, "cpu")
    block, count = Block.of(tree, first), 7 - first
    assert torch.equal(block.visible, tree.ancestors[:, first:])
    assert torch.equal(block.tokens, tree.tokens[:, first:])
    padded = block.padded(first)
    width, slots = padded.visible.shape[1:]
    assert width == bucket(count) and slots >= max(SLOTS, first + width)
    for name in ("tokens", "depths"):
        assert torch.equal(getattr(padded, name)[:, :count], getattr(block, name))
    assert torch.equal(padded.visible[:, :count, :7], block.visible)
    assert torch.equal(padded.slot_depths[:, :7], tree.depths)
    assert not padded.visible[:, :count, 7:].any()
    for node in range(count, width):  # padding
        assert padded.visible[:, node].nonzero()[:, 1].tolist() == [first + node] * 3
