"""Tree and Row against their definitions, node by node in Python."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from random_trees import GROUPS, path_to, paths_of, random_row, random_tree, visible
from torch import Tensor

from hf_spec.core import verify
from hf_spec.core.shapes import Row
from hf_spec.core.tree import Tree, TreeTensors


def check_row(tree: Tree, row: int, parents: Sequence[int]) -> None:
    """Row ``row`` is the tree with these parents, then padding."""
    n, nodes = len(parents), tree.num_tokens
    depths = [len(path_to(parents, node)) - 1 for node in range(n)]
    assert tree.parents[row].tolist() == [*parents, *[0] * (nodes - n)]
    assert tree.depths[row].tolist() == [*depths, *[1] * (nodes - n)]
    assert tree.valid[row].tolist() == [node < n for node in range(nodes)]
    assert tree.ancestors[row, :n, :n].tolist() == visible(parents)
    assert not tree.ancestors[row, :n, n:].any()
    assert tree.ancestors[row, n:].tolist() == torch.eye(nodes).bool()[n:].tolist()
    assert (tree.row_sizes[row], tree.row_depths[row]) == (n - 1, max(depths))


def random_rows(rng: random.Random) -> list[Row]:
    return [random_row(rng, rng.randint(1, 8)) for _ in range(rng.randint(1, 4))]


def prepared(rows: Sequence[Row]) -> Tree:
    """The rows as the device's code sends them: packed, and unpacked again."""
    nodes = max(len(row.tokens) for row in rows)

    def column(values: Sequence[Sequence[Any]], value: Any) -> Tensor:
        return torch.tensor([[*own, *[value] * (nodes - len(own))] for own in values])

    logs = column([row.probs for row in rows], 0.0).float().log()
    parents, depths = column([row.parents for row in rows], 3), [row.depths for row in rows]
    tokens = column([row.tokens for row in rows], 60_000)
    return Tree.unpacked(Tree.packed(parents, column(depths, 7), tokens, logs))


@pytest.mark.parametrize("seed", range(10))
def test_trees_of_different_shapes_are_padded_at_the_end(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [random_tree(rng, rng.randint(1, 8)) for _ in range(rng.randint(1, 5))]
    if seed % 3 == 0:
        shapes = shapes[:1] * 3
    tree = Tree.of_shapes(shapes)
    assert tree.tokens.shape == (len(shapes), max(map(len, shapes)))
    assert tree.batch_size == len(shapes)
    assert tree.num_nodes == tree.num_tokens == max(map(len, shapes))
    assert tree.max_depth == max(shape.max_depth for shape in shapes)
    assert tree.is_chain == all(len(shape) == shape.max_depth + 1 for shape in shapes)
    for row, shape in enumerate(shapes):
        check_row(tree, row, shape.parents)


@pytest.mark.parametrize("seed", range(10))
def test_trees_made_on_the_device_are_those_made_on_the_host(seed: int) -> None:
    """Whatever stands on the padding."""
    rows = random_rows(random.Random(seed))
    for tree in (prepared(rows), Tree.of_rows(rows, "cpu")):
        assert tree.host is not None
        assert tree.is_chain == all(r.parents == [*range(-1, len(r.parents) - 1)] for r in rows)
        for row, own in enumerate(rows):
            check_row(tree, row, own.parents)
            assert tree.tokens[row, : len(own.tokens)].tolist() == own.tokens
        for row, own in zip(tree.host.rows(tree.row_sizes), rows):
            assert (row.parents, row.tokens) == (own.parents, own.tokens)
            np.testing.assert_allclose(row.probs, own.probs, rtol=1e-5)  # float32 logarithms
        size = tree.num_nodes
        assert not tree.host.probs[~tree.valid.numpy()].any()
        assert not tree.host.parents[~tree.valid.numpy()].any()
    none = torch.zeros(1, size)
    fits = Tree.packed(none, none, torch.full((1, size), 2**24 - 1), none)
    assert Tree.unpacked(fits).tokens.eq(2**24 - 1).all()


@pytest.mark.parametrize("seed", range(10))
def test_a_merged_tree_has_the_paths_of_both(seed: int) -> None:
    rng = random.Random(seed)
    one, two = (random_row(rng, rng.randint(1, 8), vocab=4) for _ in range(2))
    merged = one.merge(two)
    wanted = paths_of(one)
    for path, prob in paths_of(two).items():
        wanted[path] = max(prob, wanted.get(path, 0.0))
    assert paths_of(merged) == wanted
    assert len(merged.parents) == len(wanted), "one node per path"
    n = len(one.parents)
    assert (merged.parents[:n], merged.tokens[:n]) == (one.parents, one.tokens)
    assert all(parent < node for node, parent in enumerate(merged.parents))


@pytest.mark.parametrize("seed", range(10))
def test_likeliest_first_sorts_and_drops_what_is_impossible(seed: int) -> None:
    rng = random.Random(seed)
    row = random_row(rng, rng.randint(1, 6)).merge(random_row(rng, rng.randint(1, 6)))
    gone = rng.randrange(1, len(row.parents)) if len(row.parents) > 1 else None
    for node in range(1, len(row.parents)):
        if gone in path_to(row.parents, node):
            row.probs[node] = 0.0
    sorted_row = row.likeliest_first()
    assert sorted_row.probs == sorted(sorted_row.probs, reverse=True)
    assert paths_of(sorted_row) == {path: p for path, p in paths_of(row).items() if p > 0}
    assert all(parent < node for node, parent in enumerate(sorted_row.parents))


@pytest.mark.parametrize("shared", [False, True], ids=["computed", "known"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("seed", range(8))
def test_trees_with_probes(seed: int, group: str, shared: bool) -> None:
    """Also when the tree without them knew its ancestors already."""
    rng, probes = random.Random(seed), GROUPS[group]
    rows = [random_row(rng, rng.randint(1, 7)) for _ in range(3)]
    bare = Tree.of_rows(rows, "cpu")
    if shared:
        assert bare.ancestors.any()
    counts = [[rng.randint(0, len(probes)) for _ in row.parents] for row in rows]
    tree, nodes = bare.attach_probes(probes, counts), bare.num_nodes
    assert tree.num_tokens == nodes and tree.num_probes == max(map(sum, counts))
    for row, (own, count) in enumerate(zip(rows, counts)):
        real = [*range(len(own.parents)), *range(nodes, nodes + sum(count))]
        seen = tree.ancestors[row]
        assert seen[real][:, real].tolist() == visible(own.parents, probes, count)
        padding = [node for node in range(tree.num_nodes) if node not in real]
        assert not seen[real][:, padding].any()
        assert all(seen[node, node] for node in padding)  # nothing attends to nothing
        assert tree.valid[row].nonzero()[:, 0].tolist() == real
        made = [(node, kind) for node, most in enumerate(count) for kind in range(most)]
        depths = [own.depths[node] + probes.offsets[kind] for node, kind in made]
        given = tree.parents[row], tree.tokens[row], tree.depths[row]
        found = [column[nodes : nodes + len(made)].tolist() for column in given]
        assert [*zip(*found)] == [(*one, depth) for one, depth in zip(made, depths)]
        for node, most in enumerate(count):
            at = tree.probes_of(torch.full((3,), node))[row, :most] - nodes
            assert [made[n] for n in at.tolist()] == [(node, kind) for kind in range(most)]
    drafted = tree.without_probes
    assert torch.equal(drafted.ancestors, bare.ancestors)
    for name in ("tokens", "parents", "depths", "valid"):
        assert torch.equal(getattr(drafted, name), getattr(bare, name))
    assert drafted.group is drafted.first_probe is drafted.probe_counts is None


def leading_to(rng: random.Random, tree: Tree) -> tuple[Tensor, list[list[int]]]:
    """The target's tokens after each node, so that all of a random path is accepted in each row."""
    targets, paths = torch.full(tree.without_probes.tokens.shape, 10**6), []
    for row, size in enumerate(tree.row_sizes):
        path = path_to(tree.parents[row].tolist(), rng.randint(0, size))
        targets[row, path[:-1]] = tree.tokens[row, path[1:]]
        paths.append(path)
    return targets, paths


def accepted(tree: Tree, targets: Tensor) -> list[list[int]]:
    return verify.match(tree, targets).to_host()[0].path


@pytest.mark.parametrize("seed", range(10))
def test_what_must_not_be_accepted(seed: int) -> None:
    """``within`` and ``without`` end the accepted path; probes and roots keep their places."""
    rng = random.Random(seed)
    tree = Tree.of_rows([random_row(rng, rng.randint(1, 8)) for _ in range(3)], "cpu")
    if seed % 2:
        tree = tree.attach_probes(GROUPS["causal"])
    targets, paths = leading_to(rng, tree)
    assert accepted(tree, targets) == paths
    limits = [rng.randint(0, 4) for _ in paths]
    assert accepted(tree.within(limits), targets) == [p[: n + 1] for p, n in zip(paths, limits)]
    unwanted = [rng.randrange(5), 60]
    wanted = [
        path[: next((i for i, n in enumerate(path) if i and own[n] in unwanted), len(path))]
        for path, own in zip(paths, tree.tokens.tolist())
    ]
    left = tree.without(unwanted)
    assert accepted(left, targets) == wanted
    assert torch.equal(left.valid[:, tree.num_tokens :], tree.valid[:, tree.num_tokens :])
    assert left.valid[:, 0].all()
    if not tree.num_probes:
        probed = tree.within(limits).attach_probes(GROUPS["causal"])
        assert accepted(probed, targets) == [path[: n + 1] for path, n in zip(paths, limits)]
    assert tree.within([tree.max_depth] * 3) is tree


@pytest.mark.parametrize("counts", [[0] * 4, [1] * 4, [3] * 4, [7] * 4, [20] * 4, [0, 7, 1, 3]])
@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_draft_tokens(seed: int, counts: list[int]) -> None:
    rows = random_rows(random.Random(seed))
    cut = [Row(*(column[: count + 1] for column in row)) for row, count in zip(rows, counts)]
    for tree in (Tree.of_rows(rows, "cpu"), prepared(rows)):
        left, same = tree.likeliest(counts), Tree.of_rows(cut, "cpu")
        assert left.host is not None
        assert (left.row_sizes, left.row_depths) == (same.row_sizes, same.row_depths)
        assert left.is_chain == same.is_chain
        for row, own in enumerate(cut):
            check_row(left, row, own.parents)
            assert left.tokens[row, : len(own.tokens)].tolist() == own.tokens
        for row, own in zip(left.host.rows(left.row_sizes), cut):
            assert (row.parents, row.tokens) == (own.parents, own.tokens)


@pytest.mark.parametrize("group", [None, *GROUPS])
@pytest.mark.parametrize("seed", range(10))
def test_padding_changes_neither_the_mask_nor_the_match(seed: int, group: str | None) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng, rng.randint(1, 7)) for _ in range(3)]
    tree = Tree.of_rows(rows, "cpu")
    if group is not None:
        counts = [[rng.randint(0, len(GROUPS[group])) for _ in row.parents] for row in rows]
        tree = tree.attach_probes(GROUPS[group], counts)
    targets, paths = leading_to(rng, tree)
    if seed % 3 == 1:  # the device has chosen the tokens
        tree = tree.with_tokens(tree.without_probes.tokens.clone())
    elif seed % 3 == 2 and group is None:  # and the shape
        tree = Tree.of_tensors(tree.tensors)
    nodes, more = tree.num_tokens, rng.randint(0, 3)
    behind = rng.randint(0, 3) if group else 0
    padded = tree.padded(nodes + more, tree.num_probes + behind)
    given = [part if part is None else part.clone() for part in padded.tensors]
    again = Tree.of_tensors(given, padded.group)
    part = dataclasses.replace(tree, source=None).part_of(padded)
    for name in TreeTensors._fields:
        found, whole = getattr(part, name), getattr(tree, name)
        assert (found is whole is None) or torch.equal(found, whole)
    own = [*range(nodes), *range(nodes + more, nodes + more + tree.num_probes)]
    padding = [node for node in range(padded.num_nodes) if node not in own]
    result = verify.match(tree, targets).to_host()[0]
    assert result.path == paths
    wide = torch.nn.functional.pad(targets, (0, more), value=3)
    for other in (padded, again):
        assert (other.num_tokens, other.num_probes) == (nodes + more, tree.num_probes + behind)
        assert torch.equal(other.ancestors[:, own][:, :, own], tree.ancestors)
        assert torch.equal(other.depths[:, own], tree.depths)
        assert torch.equal(other.tokens[:, own], tree.tokens)
        identity = torch.eye(padded.num_nodes).bool()
        assert (other.ancestors[:, padding] == identity[padding]).all()
        assert not other.ancestors[:, own][:, :, padding].any()
        assert not other.valid[:, padding].any()
        assert verify.match(other, wide).to_host()[0] == result
        if group is not None:
            last = verify.match(tree, targets).last
            for row, count in enumerate(result.num_probes):
                before, after = tree.probes_of(last)[row], other.probes_of(last)[row]
                assert [own[n] for n in before[:count].tolist()] == after[:count].tolist()
