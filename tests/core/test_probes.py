"""Probes hang where they should, against a double loop over rows."""

from __future__ import annotations

import pytest
import torch

from hf_spec.core.probes import ProbeGroup, hang
from hf_spec.core.tree import TokenTree, TreeBatch

TREE = TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
OTHER = TokenTree.chain(2)
#: Two probes per distance, as PPD's ensembles have them: those of one ensemble see each other.
ENSEMBLE = ProbeGroup(
    (1, 1, 2, 2),
    ((True, False, False, False), (False, True, False, False),
     (True, False, True, True), (False, True, True, True)),
)  # fmt: skip


def expected(tree: TokenTree, group: ProbeGroup, sizes: list[int]) -> tuple[list, list]:
    """Depths and visibility of one row's nodes and probes, by the definition."""
    rows = [("node", node, 0) for node in range(len(tree))]
    rows += [("probe", node, i) for node, size in enumerate(sizes) for i in range(size)]

    def above(node: int) -> set[int]:
        found = set()
        while node >= 0:
            found.add(node)
            node = tree.parents[node]
        return found

    depths, visible = [], []
    for kind, node, i in rows:
        depths.append(tree.depths[node] + (group.offsets[i] if kind == "probe" else 0))
        seen = []
        for other, at, j in rows:
            if other == "node":
                seen.append(at in above(node))
            else:
                seen.append(kind == "probe" and at == node and group.visible[i][j])
        visible.append(seen)
    return depths, visible


@pytest.mark.parametrize("group", [ProbeGroup.causal(3), ENSEMBLE], ids=["causal", "ensemble"])
def test_all_probes_under_every_node(group: ProbeGroup) -> None:
    probes = hang(group, TREE.batch(2))
    depths, visible = expected(TREE, group, [len(group)] * len(TREE))
    for row in range(2):
        assert probes.depths[row].tolist() == depths
        assert probes.ancestors[row].tolist() == visible
    assert probes.kinds[0].tolist() == list(range(len(group))) * len(TREE)


@pytest.mark.parametrize("group", [ProbeGroup.causal(3), ENSEMBLE], ids=["causal", "ensemble"])
def test_some_probes_under_some_nodes_of_different_trees(group: ProbeGroup) -> None:
    sizes = [[3, 0, 1, 2, 0, 0, 3], [1, 0, 2]]
    trees = [TREE, OTHER]
    probes = hang(group, TreeBatch.stack(trees), sizes)
    assert probes.num_probes == 9
    for row, (tree, own) in enumerate(zip(trees, sizes)):
        depths, visible = expected(tree, group, own)
        nodes = len(tree)
        real = [*range(nodes), *range(len(TREE), len(TREE) + sum(own))]
        assert probes.depths[row, real].tolist() == depths
        assert probes.ancestors[row][real][:, real].tolist() == visible
        padding = [i for i in range(probes.depths.shape[1]) if i not in real and i >= len(TREE)]
        assert not probes.ancestors[row][real][:, padding].any()
        assert all(probes.ancestors[row, i, i] for i in padding)  # nothing attends to nothing


def test_under_finds_the_group_of_a_node() -> None:
    group = ProbeGroup.causal(2)
    sizes = [[2, 0, 1, 2, 0, 0, 2], [1, 0, 2]]
    probes = hang(group, TreeBatch.stack([TREE, OTHER]), sizes)
    assert probes.under(torch.tensor([3, 2])).tolist() == [[3, 4], [1, 2]]
    full = hang(group, TREE.batch(1))
    assert full.under(torch.tensor([6])).tolist() == [[12, 13]]


@pytest.mark.parametrize(
    ("offsets", "visible", "message"),
    [
        ((0,), ((True,),), "from 1"),
        ((1, 2), ((True,),), "2 x 2"),
        ((1,), ((False,),), "diagonal"),
    ],
)
def test_wrong_groups_are_refused(offsets: tuple, visible: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProbeGroup(offsets, visible)
