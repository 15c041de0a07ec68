"""What drafting may cost, and when what did not pay is tried again: by hand."""

import math

import pytest

from hf_spec.policy.budget import (
    CREDIT,
    FIRST,
    HORIZON,
    LAST,
    MANY,
    ONE,
    RESUME,
    SCALE,
    Budget,
    Retry,
)  # fmt: skip

#: What one batch row may lose at first.
START = MANY + ONE


def pause(budget: Budget) -> int:
    """Plain steps until drafting resumes."""
    count = 0
    while budget.paused:
        budget.wait()
        count += 1
    return count


def test_losses_stay_within_the_budget_and_pauses_grow() -> None:
    budget, pauses, tokens, lost = Budget(), [], 0, 0.0
    while len(pauses) < 9:
        while not budget.paused:
            budget.charge(1.0, 1.5, 1)
            tokens, lost = tokens + 1, lost + 0.5
        assert lost < START * (1 + math.log1p(tokens / SCALE)) + 0.5 + tokens / 100
        pauses.append(pause(budget))
        assert RESUME <= budget.left < RESUME + 0.1
        tokens += pauses[-1]
    assert pauses[:6] == sorted(pauses[:6]) and pauses[0] < 2 * SCALE and pauses[-1] < 240
    assert budget.tokens <= HORIZON


def test_a_profit_is_credit_and_a_new_beginning() -> None:
    budget = Budget(lost=1.0, tokens=500.0)
    budget.charge(2.0, 1.5, 1)
    assert (budget.lost, budget.tokens) == (0.5, 502.0)
    for _ in range(20):
        budget.charge(3.0, 1.5, 1)
    assert (budget.lost, budget.tokens, budget.left) == (-CREDIT, 0.0, START + CREDIT)
    budget.wait()  # a plain step without a pause
    assert (budget.lost, budget.tokens) == (-CREDIT, 0.0)


@pytest.mark.parametrize(("lost", "paused"), [(START - 0.1, False), (START + 0.1, True)])
def test_a_call_drafts_with_less_left_than_the_end_of_a_pause_takes(
    lost: float, paused: bool
) -> None:
    budget = Budget(lost, paused=True)
    budget.begin()
    assert budget.paused is paused and budget.left < RESUME


def test_what_did_not_pay_is_tried_less_and_less() -> None:
    retry, gaps = Retry(), [0]
    while len(gaps) < 8:
        gaps[-1] += 1
        if retry.due():
            gaps.append(0)
    assert gaps[:-1] == [min(FIRST * 2**n, LAST) for n in range(7)]
