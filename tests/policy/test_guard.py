"""The account of what speculation has brought: by hand, and over simulated outputs.

A simulated strategy has a step cost in plain steps and a chance that a candidate is accepted; all
figures are the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from hf_spec.policy.guard import ALLOWANCE, DEBT, FRESH, FULL, PATIENCE, RETRY, Guard


def pause(guard: Guard) -> int:
    """Plain steps until the next try."""
    count = 0
    while guard.paused:
        guard.refill()
        count += 1
    return count


# -- step by step ------------------------------------------------------------------------------


def test_losses_are_paused_for_and_pauses_grow() -> None:
    guard, pauses = Guard(), []
    for _ in range(4):
        assert not guard.paused
        guard.book(1.0, 1.5)
    assert guard.paused and guard.balance == -0.5
    for _ in range(6):
        pauses.append(pause(guard))
        assert guard.balance == pytest.approx(RETRY)
        while not guard.paused:
            guard.book(1.0, 1.5)
        assert guard.balance == pytest.approx(-0.5)
    owed = (RETRY + 0.5) / ALLOWANCE
    assert pauses == [owed, 2 * owed, 4 * owed, 8 * owed, 8 * owed, 8 * owed]


def test_what_has_paid_comes_back_soon() -> None:
    """The first pauses of a strategy with a full account last a quarter and half as long."""
    guard, pauses = Guard(balance=FULL - 0.5, setbacks=4), []
    guard.book(2.0, 1.5)
    assert guard.balance == FULL and guard.setbacks == -PATIENCE
    for _ in range(5):
        while not guard.paused:
            guard.book(1.0, 1.5)
        pauses.append(pause(guard))
    owed = (RETRY + 0.5) / ALLOWANCE
    assert pauses == [owed / 4, owed / 2, owed, 2 * owed, 4 * owed]


def test_debts_are_limited() -> None:
    guard = Guard()
    guard.book(1.0, 500.0)
    assert guard.balance == -DEBT
    assert pause(guard) == (RETRY + DEBT) / ALLOWANCE


def test_a_call_tries_with_less_than_a_pause_asks_for() -> None:
    for balance, paused in ((FRESH, False), (FRESH - 0.01, True)):
        guard = Guard(balance=balance, setbacks=1, paused=True)
        guard.begin()
        assert guard.paused is paused and guard.balance == balance


# -- simulated outputs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Strategy:
    """What a step costs in plain steps, and the chance of each candidate."""

    cost: float
    chance: float = 0.0
    depth: int = 8

    def tokens(self, rng: random.Random) -> int:
        count = 1
        while count <= self.depth and rng.random() < self.chance:
            count += 1
        return count

    @property
    def speed(self) -> float:
        return sum(self.chance**k for k in range(self.depth + 1)) / self.cost


def speedup(strategy_at: Callable[[int], Strategy], calls: int, new: int, seeds: int = 30) -> float:
    """Over plain decoding, all calls together, the first being the first of a process."""
    spent = 0.0
    for seed in range(seeds):
        rng, guard = random.Random(seed), Guard()
        for _ in range(calls):
            guard.begin()
            emitted = 0
            while emitted < new:
                if guard.paused:
                    guard.refill()
                    emitted, spent = emitted + 1, spent + 1.0
                    continue
                strategy = strategy_at(emitted)
                tokens = min(strategy.tokens(rng), new - emitted)
                guard.book(tokens, strategy.cost)
                emitted, spent = emitted + tokens, spent + strategy.cost
    return seeds * calls * new / spent


@pytest.mark.parametrize("cost", [1.1, 1.3, 2.0, 9.0])
def test_what_never_pays_costs_little(cost: float) -> None:
    """Without the account: 1 / cost."""
    for calls, new in ((8, 128), (1, 1024), (40, 12)):
        assert speedup(lambda at: Strategy(cost), calls, new) > (0.965 if cost < 3 else 0.95)


@pytest.mark.parametrize("strategy", [Strategy(1.2, 0.34), Strategy(1.2, 0.45), Strategy(1.2, 0.7)])
def test_what_pays_is_left_alone(strategy: Strategy) -> None:
    for calls, new in ((8, 128), (2, 1024)):
        assert speedup(lambda at: strategy, calls, new) > 0.97 * strategy.speed


def test_acceptance_that_begins_late_is_found_and_one_that_ends_is_noticed() -> None:
    good, bad = Strategy(1.2, 0.7, 15), Strategy(1.2)
    ideal = 512 / (256 + 256 / good.speed)
    assert speedup(lambda at: good if at >= 256 else bad, 4, 512) > 0.83 * ideal
    assert (
        speedup(lambda at: good if at < 256 else bad, 4, 512) > 0.89 * ideal
    )  # the account, and the tries that patience adds
