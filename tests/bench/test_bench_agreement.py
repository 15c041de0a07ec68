"""Is a difference a tie or a fault? Constructed logits on both sides of the line."""

from types import SimpleNamespace

import pytest
import torch

from hf_spec.tools.bench.results import TIE_ULPS, Agreement, classify, is_tie, ulp

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


class FixedLogits:
    """A model whose next-token logits depend on the last token only."""

    def __init__(self, table: list[list[float]], dtype: torch.dtype = torch.bfloat16):
        self.table = torch.tensor(table, dtype=dtype)
        self.dtype, self.device = dtype, torch.device("cpu")
        self.seen: list[list[int]] = []

    def forward(self, input_ids, use_cache):
        self.seen.append(input_ids[0].tolist())
        return SimpleNamespace(logits=self.table[input_ids])

    __call__ = forward


@pytest.mark.parametrize("dtype", DTYPES)
def test_tie_ends_at_the_stated_number_of_units(dtype):
    best = 12.0
    for units, expected in ((0, True), (TIE_ULPS, True), (TIE_ULPS + 1, False)):
        scores = torch.tensor([best, best - units * ulp(best, dtype), -5.0], dtype=torch.float64)
        assert is_tie(scores, 1, 0, dtype) is expected
        assert is_tie(scores, 0, 1, dtype) is expected


def test_classification_of_constructed_outputs():
    near = 8.0 - 2 * ulp(8.0, torch.bfloat16)
    #                      0    1     2    3
    model = FixedLogits(
        [
            [0.0, 8.0, near, 1.0],  # after 0: 1 and 2 tie, 3 is far off
            [0.0, 0.0, 8.0, 1.0],  # after 1: 2 wins
            [8.0, 0.0, 0.0, 1.0],  # after 2: 0 wins
            [8.0, 0.0, 0.0, 1.0],
        ]
    )
    plain = [1, 2, 0]
    assert classify(model, [3, 0], [1, 2, 0], plain) is Agreement.IDENTICAL
    assert not model.seen  # equal outputs cost no forward
    assert classify(model, [3, 0], [2, 0, 1], plain) is Agreement.DIVERGED_AT_TIE
    assert classify(model, [3, 0], [3, 0, 1], plain) is Agreement.DIVERGED
    assert classify(model, [3, 0], [1, 3, 0], plain) is Agreement.DIVERGED
    assert model.seen[-1] == [3, 0, 1]  # the plain prefix up to the difference
    # One output merely ends early: never a tie.
    assert classify(model, [3, 0], [1, 2], plain) is Agreement.DIVERGED
    assert classify(model, [3, 0], [1, 2, 0, 1], plain) is Agreement.DIVERGED


def test_the_tie_is_judged_after_the_repetition_penalty():
    # Token 1 is far ahead by itself, but it has been seen: 8.8 / 1.1 = 8.
    model = FixedLogits([[0.0, 8.8, 8.0], [0.0, 8.8, 8.0], [0.0, 0.0, 1.0]], torch.float32)
    assert classify(model, [1, 0], [2], [1]) is Agreement.DIVERGED
    assert classify(model, [1, 0], [2], [1], repetition_penalty=1.1) is Agreement.DIVERGED_AT_TIE
