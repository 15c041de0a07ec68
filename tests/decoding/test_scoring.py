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
from hf_spec.decoding.call_sequences import Sequences
from hf_spec.decoding.scoring import Scorer

VOCAB = 20
LENGTHS = [3, 5, 5, 8]
Temperature, TopP = logits_process.TemperatureLogitsWarper, logits_process.TopPLogitsWarper
Repetition = logits_process.RepetitionPenaltyLogitsProcessor


def sequences() -> Sequences:
    ids = torch.randint(3, VOCAB, (4, 12), generator=torch.Generator().manual_seed(0))
    found = Sequences(ids, None, StoppingCriteriaList([MaxLengthCriteria(20)]))
    found.lengths = list(LENGTHS)
    return found


LISTS = {
    "rowwise": lambda: [Temperature(0.7), TopP(0.6)],
    "both": lambda: [Repetition(1.5), Temperature(0.7), TopP(0.6)],
    "in between": lambda: [Temperature(0.7), Repetition(1.5), TopP(0.6)],
    "at the end": lambda: [Temperature(0.7), Repetition(1.5)],
}


@pytest.mark.parametrize("made", LISTS.values(), ids=LISTS)
def test_scores_of_whole_trees(made: Any) -> None:
    """Typical acceptance needs those of all nodes, each after its own prefix."""
    rows, rng = sequences(), random.Random(0)
    shapes = [random_tree(rng, size) for size in (7, 1, 4, 6)]
    tree = Tree.of_shapes(shapes)
    generator = torch.Generator().manual_seed(2)
    tree = tree.with_tokens(torch.randint(VOCAB, tree.tokens.shape, generator=generator))
    logits = torch.randn(4, tree.num_nodes, VOCAB, generator=generator)
    found = Scorer(LogitsProcessorList(made()), rows).everywhere(tree, logits)
    for row, shape in enumerate(shapes):
        for node in range(len(shape)):
            path, above = [], node
            while above:
                path, above = [int(tree.tokens[row, above]), *path], shape.parents[above]
            ids = torch.tensor([[*rows.ids[row, : LENGTHS[row]].tolist(), *path]])
            expected = LogitsProcessorList(made())(ids, logits[row : row + 1, node].clone())
            assert torch.equal(found[row, node], expected[0])
