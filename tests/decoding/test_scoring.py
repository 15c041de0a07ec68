"""Logits processors on rows of different lengths, against one row at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from random_trees import random_tree
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import logits_process

from hf_spec.core.tree import Tree
from hf_spec.decoding.acceptance import Acceptance
from hf_spec.decoding.scoring import Scorer
from hf_spec.decoding.sequences import Sequences
from hf_spec.drafting.options import DraftOptions

VOCAB = 20
LENGTHS = [3, 5, 5, 8]
SUFFIX = torch.tensor([[4, 4], [6, 5], [7, 4], [1, 2]])

Temperature, TopP = logits_process.TemperatureLogitsWarper, logits_process.TopPLogitsWarper
Repetition = logits_process.RepetitionPenaltyLogitsProcessor


class Counted(Temperature):
    """A processor of the user's, which may look at anything."""

    def __init__(self, temperature: float):
        super().__init__(temperature)
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.shapes.append((len(scores), input_ids.shape[1]))
        return super().__call__(input_ids, scores)


def sequences() -> Sequences:
    ids = torch.randint(3, VOCAB, (4, 12), generator=torch.Generator().manual_seed(0))
    found = Sequences(ids, None, StoppingCriteriaList([MaxLengthCriteria(20)]))
    found.lengths = list(LENGTHS)
    return found


def logits() -> Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)) * 4


LISTS = {
    "rowwise": lambda: [Temperature(0.7), TopP(0.6)],
    "both": lambda: [Repetition(1.5), Temperature(0.7), TopP(0.6)],
    "in between": lambda: [Temperature(0.7), Repetition(1.5), TopP(0.6)],
    "at the end": lambda: [Temperature(0.7), Repetition(1.5)],
}


@pytest.mark.parametrize("made", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("active", [[True] * 4, [True, False, True, True], [False] * 4])
@pytest.mark.parametrize("size", [0, 2])
def test_scores_are_those_of_each_row_alone(made: Any, active: list[bool], size: int) -> None:
    rows = sequences()
    found = Scorer(LogitsProcessorList(made()), rows)(logits(), SUFFIX[:, :size], active)
    for row, suffix in enumerate(SUFFIX[:, :size]):
        expected = logits()[row : row + 1]
        if active[row]:
            ids = torch.cat([rows.ids[row, : LENGTHS[row]], suffix])[None]
            expected = LogitsProcessorList(made())(ids, expected)
        assert torch.equal(found[row : row + 1], expected)


def test_processors_of_the_user_see_the_batch() -> None:
    """Once for each length, and not less because only some rows are asked for."""
    counted = Counted(0.7)
    scorer = Scorer(LogitsProcessorList([counted]), sequences())
    scorer(logits(), SUFFIX, [True, False, True, True])
    assert counted.shapes == [(4, 5), (4, 7), (4, 10)]


@pytest.mark.parametrize("made", LISTS.values(), ids=LISTS)
def test_scores_of_whole_trees(made: Any) -> None:
    """Typical acceptance needs those of all nodes, each after its own prefix."""
    rows, rng = sequences(), random.Random(0)
    shapes = [random_tree(rng, size) for size in (7, 1, 4, 6)]
    tree = Tree.of_shapes(shapes)
    generator = torch.Generator().manual_seed(2)
    tree = tree.with_tokens(torch.randint(VOCAB, tree.tokens.shape, generator=generator))
    logits = torch.randn(4, tree.num_nodes, VOCAB, generator=generator)
    options, scorer = DraftOptions(acceptance="typical"), Scorer(LogitsProcessorList(made()), rows)
    found = Acceptance(GenerationConfig(), options, scorer)._everywhere(tree, logits)
    for row, shape in enumerate(shapes):
        for node in range(len(shape)):
            path, above = [], node
            while above:
                path, above = [int(tree.tokens[row, above]), *path], shape.parents[above]
            ids = torch.tensor([[*rows.ids[row, : LENGTHS[row]].tolist(), *path]])
            expected = LogitsProcessorList(made())(ids, logits[row : row + 1, node].clone())
            assert torch.equal(found[row, node], expected[0])
