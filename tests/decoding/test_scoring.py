"""Logits processors on rows of different lengths, against one row at a time."""

import random
from typing import Any

import pytest
import torch
from random_trees import random_tree
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import logits_process

from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.decoding.acceptance import Scorer
from hf_spec.decoding.sequences import Sequences

VOCAB = 20
LENGTHS = [3, 5, 5, 8]
Temperature, TopP = logits_process.TemperatureLogitsWarper, logits_process.TopPLogitsWarper
Repetition = logits_process.RepetitionPenaltyLogitsProcessor


def sequences() -> Sequences:
    ids = torch.randint(3, VOCAB, (4, 12), generator=torch.Generator().manual_seed(0))
    found = Sequences(ids, None, StoppingCriteriaList([MaxLengthCriteria(20)]))
    found.lengths = list(LENGTHS)
    return found


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_what_is_recorded_holds_no_more_than_itself(wanted: tuple[bool, bool]) -> None:
    """Of a token: not what other rows and deeper tokens had, nor what no one asked for."""
    rows = sequences()
    rows.rows = [0, 2]
    pair = [torch.randn(2, VOCAB) if one else None for one in wanted]
    rows.append(HostResult([[0, 1], [0]], [[5, 6], [7]], [0, 0]), [tuple(pair)] * 2)
    for row, count in zip(rows.rows, (2, 1)):
        assert len(rows._recorded[row]) == count
        for values in rows._recorded[row]:
            for value, one in zip(values, pair):
                if one is None:
                    assert value is None
                else:
                    assert value.untyped_storage().nbytes() == VOCAB * 4
                    assert torch.equal(value, one[rows.rows.index(row)])


LISTS = {
    "rowwise": lambda: [Temperature(0.7), TopP(0.6)],
    "both": lambda: [Repetition(1.5), Temperature(0.7), TopP(0.6)],
    "in between": lambda: [Temperature(0.7), Repetition(1.5), TopP(0.6)],
    "at the end": lambda: [Temperature(0.7), Repetition(1.5)],
    "without the first columns": lambda: [Repetition(1.5, prompt_ignore_length=2)],
    "without padding": lambda: [Repetition(1.5, prompt_ignore_length=torch.tensor([0, 2, 1, 3]))],
    "short": lambda: [
        logits_process.MinLengthLogitsProcessor(7, [3, 4]),
        Repetition(1.5),
        logits_process.MinNewTokensLengthLogitsProcessor(2, 4, 5),
        Temperature(0.7),
    ],
    "by order": lambda: [Repetition(1.5), logits_process.NoRepeatNGramLogitsProcessor(2)],
}


@pytest.mark.parametrize("made", LISTS.values(), ids=LISTS)
def test_scores_of_whole_trees(made: Any) -> None:
    """Typical acceptance needs those of all nodes, each after its own prefix."""
    rows, rng = sequences(), random.Random(0)
    shapes = [random_tree(rng, size) for size in (7, 1, 4, 6)]
    tree = Tree.of_shapes(shapes)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, tree.tokens.shape, generator=generator)
    tokens[:, 0] = rows.ids[range(4), [length - 1 for length in LENGTHS]]  # the last ones
    tree = tree.with_tokens(tokens)
    logits = torch.randn(4, tree.num_nodes, VOCAB, generator=generator)
    scorer = Scorer(LogitsProcessorList(made()), rows)
    found = scorer.everywhere(tree, logits, scorer.context())
    for row, shape in enumerate(shapes):
        for node in range(len(shape)):
            path, above = [], node
            while above:
                path, above = [int(tree.tokens[row, above]), *path], shape.parents[above]
            ids = torch.tensor([[*rows.ids[row, : LENGTHS[row]].tolist(), *path]])
            # As in plain generation, where processors see all rows at once.
            expected = LogitsProcessorList(made())(ids.expand(4, -1), logits[:, node].clone())
            assert torch.equal(found[row, node], expected[row])
