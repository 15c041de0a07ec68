"""The rows of a call's batch, as a step sees them."""

import random

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from hf_spec.core.verify import HostResult
from hf_spec.decoding.acceptance import Scorer
from hf_spec.decoding.sequences import Sequences

EOS, WIDTH, MOST = 7, 3, 12


@pytest.mark.parametrize("seed", range(20))
def test_a_snapshot_of_the_rows_lasts_until_they_change(seed: int) -> None:
    rng = random.Random(seed)
    criteria = StoppingCriteriaList([MaxLengthCriteria(MOST), EosTokenCriteria(EOS)])
    sequences = Sequences(torch.arange(4 * WIDTH).view(4, WIDTH) + 10, None, criteria)
    rows = [[*range(10 + WIDTH * row, 10 + WIDTH * (row + 1))] for row in range(4)]

    def ended(row: list[int]) -> bool:
        return EOS in row or len(row) == MOST

    for _ in range(8):
        seen = sequences.now
        assert seen.tokens == rows
        assert seen.active == [not ended(row) for row in rows]
        assert seen.remaining == [MOST - len(row) for row in rows]
        assert sequences.now is seen
        new = [[rng.choice([1, 2, 3, 4, EOS]) for _ in range(rng.randint(1, 3))] for _ in rows]
        sequences.append(HostResult([[0]] * len(rows), new, [0] * len(rows)))
        for row, tokens in zip(rows, new):
            while tokens and not ended(row):
                row.append(tokens.pop(0))
        if rng.random() < 0.4:
            kept = rng.sample(range(len(rows)), rng.randint(1, len(rows)))
            assert sequences.now.active == [not ended(row) for row in rows]
            sequences.select(kept)
            rows = [rows[row] for row in kept]


@pytest.mark.parametrize("seen_before", [False, True])
def test_processors_see_each_row_at_its_place_wherever_it_is_in_the_batch(
    seen_before: bool,
) -> None:
    """As rows do whose call shares steps: they change places although all are still there."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.5), NoRepeatNGramLogitsProcessor(2)]
    )
    sequences = Sequences(ids, None, StoppingCriteriaList([MaxLengthCriteria(20)]))
    scorer, none = Scorer(processors, sequences), torch.zeros(3, 0, dtype=torch.long)
    if seen_before:
        scorer(torch.zeros(3, 20), none, [True] * 3)
    order = [2, 0, 1]
    sequences.select(order)
    found = scorer(logits[order], none, [True] * 3)
    assert torch.equal(found, processors(ids, logits.clone())[order])
