"""Lookups merged into the trees of a drafter that is given by hand."""

import pytest
import torch
from random_trees import GROUPS

from hf_spec.core.shapes import Row
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.draft.lookup import OTHERS, BatchLookup, Limits, merged

#: What follows 5: 6, then 7; nothing follows the last token of the second row.
TEXTS = [[5, 6, 7, 8, 5], [1, 2, 3]]


def with_lookups(tree: Tree, active: tuple[bool, ...] = (True, True)) -> Tree:
    found = BatchLookup(Limits(), TEXTS).lookup(TEXTS, active, 3)
    assert [row.tokens[1:] for row in found] == [[6, 7, 8] * active[0], []]
    return merged(tree, found)


def test_other_answers_to_the_prompt_are_searched() -> None:
    """Finished ones, too; not answers to other prompts, and no place that nothing follows."""
    lookups = BatchLookup(Limits(), [[1, 2], [1, 2], [1, 3]])
    texts = [[1, 2, 7, 8, 9], [1, 2, 5, 7], [1, 3, 6, 7]]
    rows = lookups.lookup(texts, [True, True, True], 3)
    assert [row.tokens for row in rows] == [[9], [7, 8, 9], [7]]
    lookups.select([1])
    assert lookups.lookup([[*texts[1], 8]], [True], 3)[0].tokens == [8, 9]
    many = BatchLookup(Limits(), [[1, 2]] * 50).rows
    assert all(len({*map(id, row.others)} - {id(row)}) == OTHERS for row in many)
    equal = BatchLookup(Limits(), [[1, 2]] * 2)
    for _ in range(2):
        assert [row.tokens for row in equal.lookup([[1, 2, 7]] * 2, [True] * 2, 3)] == [[7]] * 2


def test_what_is_known_to_follow_is_continued() -> None:
    """The likeliest path of it, beside the continuations of the sequence itself."""
    text = [1, 2, 3, 1, 4, 2]
    known = Row([-1, 0, 0, 1], [2, 9, 8, 1], [1.0, 0.7, 0.3, 0.7])
    lookup = BatchLookup(Limits(), [text])
    [alone] = lookup.lookup([text], [True], 5)
    behind, _ = lookup.rows[0]._continued([*text, 9, 1], 3)
    [found] = BatchLookup(Limits(), [text]).lookup([text], [True], 5, [known])
    expected = known.merge(alone).merge(behind, at=3)
    assert found == expected.likeliest_first()
    assert [known.path(known.end), found.tokens.count(4)] == [[9, 1], 2]
    assert expected.probs[-1] == pytest.approx(0.7 * behind.probs[-1])


def test_sequences_that_join_keep_what_they_have_learned() -> None:
    first, second = ([[5, 6, 7, 5]], [[1, 2, 3, 1], [4, 4]])
    lookups, new = BatchLookup(Limits(), first), BatchLookup(Limits(), second)
    texts = first + second
    new.lookup(second, [True, True], 3)
    new.observe(HostResult([[0], [0]], [[9], [4]], [0, 0]))  # a miss, and a hit
    lookups.join(new)
    found = lookups.lookup(texts, [True] * 3, 3)
    assert [row.tokens[1:] for row in found] == [[6, 7, 5], [2, 3, 1], [4, 4, 4]]
    chances = [max(row.probs[1:]) for row in found]
    assert chances[1] < chances[0] < chances[2]


def rows_of(tree: Tree) -> list[tuple[list[int], list[int]]]:
    """Parents and tokens of each row, without padding."""
    columns = zip(
        tree.without_probes.parents.tolist(), tree.without_probes.tokens.tolist(), tree.row_sizes
    )
    return [(parents[: n + 1], tokens[: n + 1]) for parents, tokens, n in columns]


def test_trees_of_known_probabilities_are_sorted_anew() -> None:
    own = [Row([-1, 0, 0], [5, 6, 9], [1.0, 0.3, 0.01]), Row([-1, 0], [3, 4], [1.0, 0.5])]
    tree = with_lookups(Tree.of_rows(own, "cpu"))
    assert tree.host is not None
    first, second = tree.host.rows(tree.row_sizes)
    assert (first.tokens, first.parents) == ([5, 6, 7, 8, 9], [-1, 0, 1, 2, 0])
    assert first.probs[1] > 0.3 and first.probs[-1] == 0.01  # the surer of both says
    assert second == own[1]


def test_finished_rows_look_nothing_up() -> None:
    own = [Row.root(5), Row([-1, 0], [3, 4], [1.0, 0.5])]
    tree = with_lookups(Tree.of_rows(own, "cpu"), (False, True))
    assert rows_of(tree) == [([-1], [5]), ([-1, 0], [3, 4])]


@pytest.mark.parametrize("group", [None, *GROUPS])
@pytest.mark.parametrize("sampled", [False, True])
def test_lookups_are_appended_to_trees_that_are_forwarded_whole(
    sampled: bool, group: str | None
) -> None:
    """They count as certain where candidates are sampled, and have no probes."""
    q = torch.rand(2, 3, 12).softmax(-1) if sampled else None
    tree = Tree.chain(torch.tensor([[5, 6, 9], [3, 4, 4]])).changed(q=q)
    if group is not None:
        tree = tree.attach_probes(GROUPS[group], [[3, 0, 2], [1, 1, 1]])
    found = with_lookups(tree)
    assert rows_of(found) == [([-1, 0, 1, 1, 3], [5, 6, 9, 7, 8]), ([-1, 0, 1], [3, 4, 4])]
    assert not found.ranked
    if q is not None:
        assert found.q is not None and torch.equal(found.q[:, :3], q)
        certain = torch.nn.functional.one_hot(found.without_probes.tokens[:, 3:], 12)
        assert torch.equal(found.q[0, 3:], certain[0].to(q))
    else:
        assert found.q is None
    if group is not None:
        assert found.probe_counts.tolist() == [[3, 0, 2, 0, 0], [1, 1, 1, 0, 0]]
        assert found.num_probes == 5 and found.group == GROUPS[group]
    else:
        assert found.group is None
