"""Logits processors on rows of different lengths, against one row at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from hf_spec.decoding.scoring import ROWWISE, Scorer

VOCAB = 20
LENGTHS = [3, 5, 5, 8]
SUFFIXES = [[4, 4], [], [7], [1, 2, 3]]

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


def emission() -> Any:
    ids = torch.randint(3, VOCAB, (4, 12), generator=torch.Generator().manual_seed(0))

    def write(row: int, start: int, tokens: list[int]) -> None:
        ids[row, start : start + len(tokens)] = torch.tensor(tokens)

    return SimpleNamespace(ids=ids, lengths=LENGTHS, write=write, shown=lambda n: ids[:, :n])


def logits() -> Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)) * 4


LISTS = {
    "rowwise": lambda: [Temperature(0.7), TopP(0.6)],
    "both": lambda: [Repetition(1.5), Temperature(0.7), TopP(0.6)],
    "in between": lambda: [Temperature(0.7), Repetition(1.5), TopP(0.6)],
    "at the end": lambda: [Temperature(0.7), Repetition(1.5)],
}


@pytest.mark.parametrize("made", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("active", [None, [True, False, True, True], [False] * 4])
def test_scores_are_those_of_each_row_alone(made: Any, active: list[bool] | None) -> None:
    rows = emission()
    found = Scorer(LogitsProcessorList(made()), rows)(logits(), SUFFIXES, active)
    for row, suffix in enumerate(SUFFIXES):
        expected = logits()[row : row + 1]
        if active is None or active[row]:
            ids = torch.cat([rows.ids[row, : LENGTHS[row]], torch.tensor(suffix, dtype=torch.long)])
            ids = ids[None]
            expected = LogitsProcessorList(made())(ids, expected)
        assert torch.equal(found[row : row + 1], expected)


def test_processors_of_the_user_see_the_batch() -> None:
    """Once for each length, and not less because only some rows are asked for."""
    counted = Counted(0.7)
    Scorer(LogitsProcessorList([counted]), emission())(
        logits(), SUFFIXES, [True, False, True, True]
    )
    assert counted.shapes == [(4, 5), (4, 6), (4, 11)]


@pytest.mark.parametrize("kind", ROWWISE)
def test_what_treats_rows_alone(kind: type) -> None:
    """Scores of a row depend on nothing but this row's."""
    arguments: dict[str, Any] = {
        "EpsilonLogitsWarper": {"epsilon": 0.05}, "EtaLogitsWarper": {"epsilon": 0.05},
        "MinPLogitsWarper": {"min_p": 0.1}, "TemperatureLogitsWarper": {"temperature": 0.5},
        "SuppressTokensLogitsProcessor": {"suppress_tokens": [2]},
        "TopKLogitsWarper": {"top_k": 3}, "TopPLogitsWarper": {"top_p": 0.6},
        "TypicalLogitsWarper": {"mass": 0.5},
    }  # fmt: skip
    ids = emission().ids
    together = kind(**arguments.get(kind.__name__, {}))(ids, logits())
    if kind is not logits_process.InfNanRemoveLogitsProcessor:
        assert not torch.equal(together, logits())
    for row in range(4):
        alone = kind(**arguments.get(kind.__name__, {}))(ids[:1, :1], logits()[row : row + 1])
        assert torch.equal(together[row : row + 1], alone)
