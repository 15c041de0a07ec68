"""The controller against a clock that the test turns: simulated strategies, and the real loop.

A simulated strategy has a step cost in plain steps and a chance that a candidate is accepted. All
times are made up, so every figure here is the same on every machine.
"""

from __future__ import annotations

import gc
import json
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import PAD, STRATEGIES, prompt, ragged
from fake_clock import FakeClock
from transformers import PreTrainedModel

import hf_spec
from hf_spec.core.stats import SpecStats
from hf_spec.methods.registry import get_method, methods
from hf_spec.policy import memory
from hf_spec.policy.controller import (
    ALLOWANCE,
    CLEAR,
    DEBT,
    FRESH,
    FULL,
    KEPT,
    LOOKS,
    NOTHING,
    PAIRED,
    PATIENCE,
    RETRY,
    START,
    Account,
    Controller,
    Costs,
    History,
    switched_on,
)
from hf_spec.policy.memory import recall

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def controller_for(
    model: Any, strategy: str, setting: Any, stats: SpecStats, enabled: bool
) -> Controller:
    """As the loop makes it."""
    return Controller(stats, recall(model, (History, strategy), History), setting, enabled)


class Model:
    """Something that can be remembered."""


# -- simulated calls ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Strategy:
    """What a step costs in plain steps, and the chance of each candidate.

    Attributes:
        empty: share of steps for which no draft is found.
        drafting: part of the cost that is spent before the forward.
    """

    cost: float
    chance: float = 0.0
    depth: int = 8
    empty: float = 0.0
    drafting: float = 0.02

    @property
    def tau(self) -> float:
        """Expected tokens of a step that drafts."""
        return sum(self.chance**k for k in range(self.depth + 1))


#: ``strategy_at(emitted)``: what drafting is like at this place of an output.
StrategyAt = Callable[[int], Strategy]

TAU_1_8 = Strategy(1.2, 0.445)


def noise(rng: random.Random) -> float:
    """A step on a machine that also does other things: +- 10 %, and one in a hundred stalls."""
    return rng.lognormvariate(0.0, 0.1) * (10.0 if rng.random() < 0.01 else 1.0)


MEAN_NOISE = math.exp(0.1**2 / 2) * 1.09


def decode(
    clock: FakeClock,
    rng: random.Random,
    model: Any,
    strategy_at: StrategyAt,
    new: int = 128,
    enabled: bool = True,
) -> tuple[float, SpecStats]:
    """One call: its time in plain steps, and its statistics."""
    stats = SpecStats()
    one = controller_for(model, "simulated", "here", stats, enabled)
    begin, emitted = clock.now, 0
    while emitted < new:
        tokens = rows = 1
        start, now = clock.now, strategy_at(emitted)
        if not one.speculate():
            clock.now += noise(rng)
        elif rng.random() < now.empty:
            clock.now += now.drafting
            stats.draft_seconds += now.drafting
            clock.now += noise(rng)
        else:
            rows = now.depth + 1
            while tokens < rows and rng.random() < now.chance:
                tokens += 1
            clock.now += now.cost * noise(rng)
        tokens = min(tokens, new - emitted)
        emitted += tokens
        one.observe(rows, [tokens], clock.now - start)
    stats.details = one.details()
    return (clock.now - begin) / MEAN_NOISE, stats


def speedups(
    clock: FakeClock,
    strategy_at: StrategyAt | Strategy,
    calls: int = 6,
    new: int = 128,
    enabled: bool = True,
    seeds: int = 40,
) -> list[float]:
    """Over plain decoding, call by call, the first being the first of a process."""
    at = strategy_at if callable(strategy_at) else lambda emitted: strategy_at
    times = [0.0] * calls
    for seed in range(seeds):
        rng, model = random.Random(seed), Model()
        for call in range(calls):
            times[call] += decode(clock, rng, model, at, new, enabled)[0]
    return [new * seeds / time for time in times]


def mean(values: list[float]) -> float:
    """Speedup of all calls together."""
    return len(values) / sum(1 / value for value in values)


NEVER = [Strategy(1.1), Strategy(1.3), Strategy(2.0), Strategy(3.0), Strategy(1.3, empty=0.8)]
PAYING = [Strategy(1.2, 0.34), TAU_1_8, Strategy(1.2, 0.7, 15)]


@pytest.mark.parametrize("strategy", NEVER, ids=str)
def test_never_accepted(clock: FakeClock, strategy: Strategy) -> None:
    """Without the controller: 1 / cost."""
    found = speedups(clock, strategy)
    # The first call of a process has everything to learn: a draft, two looks, START to lose.
    assert found[0] > (0.93 if strategy.cost < 3 else 0.92)
    assert all(one > 0.95 for one in found[1:])
    assert mean(found) > 0.965 and mean(found[1:]) > 0.975


def test_never_accepted_in_short_calls(clock: FakeClock) -> None:
    """Many calls have no more tries than one long one."""
    for cost in (1.1, 1.3, 3.0):
        found = speedups(clock, Strategy(cost), calls=30, new=12)
        assert mean(found[5:]) > 0.96


def test_one_ruinous_step_is_paid_back_over_calls(clock: FakeClock) -> None:
    found = speedups(clock, Strategy(9.0), calls=12)
    assert mean(found[1:]) > 0.97


@pytest.mark.parametrize("strategy", PAYING, ids=str)
def test_what_pays_is_left_alone(clock: FakeClock, strategy: Strategy) -> None:
    for calls, new, lost in ((8, 128, 0.02), (2, 1024, 0.01)):
        found = speedups(clock, strategy, calls, new)
        always = speedups(clock, strategy, calls, new, enabled=False)
        assert mean(found) > (1 - lost) * mean(always)
        assert found[0] > 0.95 * always[0]


def test_even_is_not_made_worse(clock: FakeClock) -> None:
    found = speedups(clock, Strategy(1.2, 1 / 6))
    assert mean(found) > 0.98


def test_a_machine_of_changing_speed(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 25 steps on average it becomes 2.5 times slower, or fast again."""
    slow = False

    def bursts(rng: random.Random) -> float:
        nonlocal slow
        slow ^= rng.random() < 1 / 25
        return rng.lognormvariate(0.0, 0.15) * (2.5 if slow else 1.0)

    monkeypatch.setitem(globals(), "noise", bursts)
    always, found = (
        mean(speedups(clock, TAU_1_8, calls=8, enabled=enabled)) for enabled in (False, True)
    )
    assert found > 0.96 * always
    # Plain decoding on this machine: a strategy that is always in a pause.
    plain = mean(speedups(clock, Strategy(1.0), calls=8, enabled=False))
    assert mean(speedups(clock, Strategy(1.3), calls=8)) > 0.95 * plain


def test_acceptance_that_begins_late_is_found(clock: FakeClock) -> None:
    """Nothing for 256 tokens, then a tau of 3: the second half takes 0.4 of plain time."""
    late = speedups(clock, lambda at: Strategy(1.2, 0.7 if at >= 256 else 0.0, 15), 4, 512)
    ideal = 512 / (256 + 256 * 1.2 / Strategy(1.2, 0.7, 15).tau)
    assert mean(late) > 0.85 * ideal


def test_acceptance_that_ends_early_is_noticed(clock: FakeClock) -> None:
    early = speedups(clock, lambda at: Strategy(1.2, 0.7 if at < 256 else 0.0, 15), 4, 512)
    ideal = 512 / (256 + 256 * 1.2 / Strategy(1.2, 0.7, 15).tau)
    assert mean(early) > 0.92 * ideal  # the account, and the tries that patience adds


def test_prompts_of_another_kind_are_tried_at_once(clock: FakeClock) -> None:
    """Ten calls in which nothing was accepted, and then one in which drafts hit."""
    shares = []
    for seed in range(20):
        rng, model = random.Random(seed), Model()
        for _ in range(10):
            decode(clock, rng, model, lambda at: Strategy(1.2))
        _, stats = decode(clock, rng, model, lambda at: Strategy(1.2, 0.8, 15))
        shares.append(stats.num_fallback_steps / 128)
    assert sum(shares) / len(shares) < 0.25


def test_simulations_are_the_same_every_time(clock: FakeClock) -> None:
    assert speedups(clock, TAU_1_8, 2, seeds=2) == pytest.approx(
        speedups(clock, TAU_1_8, 2, seeds=2)
    )


# -- step by step ------------------------------------------------------------------------------


class Steps:
    """A controller whose steps take exactly what the test says."""

    def __init__(
        self, clock: FakeClock, costs: Costs | None = None, account: Account | None = None
    ):
        self.clock, self.stats = clock, SpecStats()
        self.costs, self.account = costs or Costs(), account or Account()
        self.one = Controller(self.stats, History(self.account, {None: self.costs}), None)

    def plain(self, seconds: float = 1.0) -> None:
        assert not self.one.speculate()
        self.clock.now += seconds
        self.one.observe(1, [1], seconds)

    def draft(
        self,
        seconds: float,
        emitted: int | list[int] = 1,
        rows: int = 5,
        drafting: float = 0.0,
        forwards: int = 0,
    ) -> None:
        assert self.one.speculate()
        self.clock.now += seconds
        self.stats.draft_seconds += drafting
        self.stats.num_draft_forwards += forwards
        emissions = [emitted] if isinstance(emitted, int) else emitted
        self.one.observe(rows, emissions, seconds)

    def pause(self) -> int:
        """Plain steps until the next try."""
        count = 0
        while self.account.paused:
            self.plain()
            count += 1
        return count


def known(*plain: float) -> Costs:
    costs = Costs()
    for seconds in plain or (1.0, 1.0):
        costs.time_plain(seconds)
    return costs


def test_the_first_step_drafts_and_the_next_two_time_a_plain_step(clock: FakeClock) -> None:
    steps = Steps(clock)
    steps.draft(9.0)  # whatever it takes: a first step is slow
    steps.plain(7.0)
    steps.plain(1.0)
    assert steps.costs.plain == 1.0
    steps.draft(3.0)  # the first of its kind that has something to be compared with
    assert steps.account.balance == START
    steps.draft(1.5)
    assert steps.account.balance == START + 1 - 1.5
    assert steps.stats.num_fallback_steps == 2


def test_no_plain_step_is_timed_while_drafts_are_long(clock: FakeClock) -> None:
    steps = Steps(clock)
    for _ in range(LOOKS[1]):
        steps.draft(1.5, emitted=6)
    steps.plain()
    steps.plain()
    steps.draft(1.5, emitted=6)


def test_the_plain_step_is_looked_at_now_and_then(clock: FakeClock) -> None:
    steps, looks = Steps(clock, known()), []
    for _ in range(3 * LOOKS[1]):
        before = steps.stats.num_fallback_steps
        if steps.one.speculate():
            steps.one.observe(5, [2], 1.2)
        else:
            steps.one.observe(1, [1], 2.0)
        if steps.stats.num_fallback_steps > before:
            looks.append(_)
    gaps = [later - sooner - 1 for sooner, later in zip([-1, *looks], looks)]
    assert gaps == [8, 16, 32, 64, 128, 128]
    assert steps.costs.plain == 2.0


def test_an_empty_draft_times_a_plain_step(clock: FakeClock) -> None:
    """Its drafting time excepted, which is all that it costs."""
    steps = Steps(clock, account=Account(tokens=CLEAR + 1))
    for _ in range(2):
        steps.draft(1.25, rows=1, drafting=0.25)
    assert (steps.costs.plain, steps.costs.of(NOTHING)) == (1.0, 0.25)
    assert steps.account.balance == START - 0.25


def test_a_root_after_draft_forwards_is_no_plain_step(clock: FakeClock) -> None:
    steps = Steps(clock, account=Account(tokens=CLEAR + 1))
    for _ in range(2):
        steps.draft(3.0, rows=1, forwards=2)
    assert steps.costs.plain is None


def test_losses_are_paused_for_and_pauses_grow(clock: FakeClock) -> None:
    steps = Steps(clock, known())
    steps.draft(1.5)  # the first of its kind
    for _ in range(4):
        steps.draft(1.5)
    assert steps.account.paused and steps.account.balance == -0.5
    pauses = []
    for _ in range(6):
        pauses.append(steps.pause())
        assert steps.account.balance == pytest.approx(RETRY)
        while not steps.account.paused:
            steps.draft(1.5)
        assert steps.account.balance == pytest.approx(-0.5)
    owed = (RETRY + 0.5) / ALLOWANCE
    assert pauses == [owed, 2 * owed, 4 * owed, 8 * owed, 8 * owed, 8 * owed]
    assert steps.stats.num_fallback_steps == sum(pauses)


def test_gains_end_the_setbacks(clock: FakeClock) -> None:
    steps = Steps(clock, known(), Account(balance=RETRY, setbacks=4))
    steps.draft(1.5, emitted=2)
    steps.draft(1.5, emitted=2)
    assert steps.account.balance == START and steps.account.setbacks == 0
    for _ in range(100):
        steps.draft(1.5, emitted=3)
        if steps.costs.age >= steps.costs.look:
            steps.plain()
    assert steps.account.balance == FULL


def test_what_has_paid_comes_back_soon(clock: FakeClock) -> None:
    """The first pauses of a strategy with a full account last a quarter and half as long."""
    account = Account(balance=FULL - 0.5, setbacks=4)
    steps = Steps(clock, known(), account)
    steps.draft(1.5, emitted=2)
    steps.draft(1.5, emitted=2)
    assert account.balance == FULL and account.setbacks == -PATIENCE
    pauses = []
    for _ in range(5):
        while not account.paused:
            if steps.costs.age >= steps.costs.look:
                steps.plain()
            steps.draft(1.5)
        assert account.balance == pytest.approx(-0.5)
        pauses.append(steps.pause())
    owed = (RETRY + 0.5) / ALLOWANCE
    assert pauses == [owed / 4, owed / 2, owed, 2 * owed, 4 * owed]


def test_times_far_apart_are_not_compared(clock: FakeClock) -> None:
    """Where the machine becomes three times slower, a step costs as many plain steps as before."""
    steps = Steps(clock, known())
    for _ in range(KEPT):
        steps.draft(1.25, emitted=2)
    for _ in range(LOOKS[0] - KEPT):
        steps.draft(3.75, emitted=2)
    assert steps.costs.of((3, 0)) == 1.25 and steps.account.balance == FULL
    steps.plain(3.0)
    for _ in range(PAIRED):
        steps.draft(3.0, emitted=2)  # it is cheaper now
    steps.draft(30.0, emitted=2)
    assert list(steps.costs._relative[(3, 0)]) == [1.25, 1.25, *[1.0] * PAIRED]


def test_a_call_begins_without_anything_to_compare_with(clock: FakeClock) -> None:
    """What a plain step took in the call before says nothing of the machine now."""
    steps = Steps(clock, known())
    steps.draft(1.25), steps.draft(1.25)
    later = Steps(clock, steps.costs, steps.account)
    before = later.account.balance
    later.draft(9.0)
    assert later.account.balance == before + 1 - 1.25


def test_a_stall_is_not_held_against_a_strategy(clock: FakeClock) -> None:
    steps = Steps(clock, known())
    steps.draft(1.25, emitted=2), steps.draft(1.25, emitted=2)
    steps.costs.age = steps.costs.look
    steps.plain()
    before = steps.account.balance
    steps.draft(500.0, emitted=1)
    assert steps.account.balance == before + 1 - 1.25


def test_no_step_counts_as_cheaper_than_a_plain_one(clock: FakeClock) -> None:
    steps = Steps(clock, known(), Account(balance=RETRY))
    steps.draft(0.25), steps.draft(0.25)
    assert steps.account.balance == RETRY and steps.account.cost == 1.0


def test_debts_are_limited(clock: FakeClock) -> None:
    steps = Steps(clock, known())
    for _ in range(2):
        steps.draft(500.0)
    assert steps.account.balance == -DEBT
    assert steps.pause() == (RETRY + DEBT) / ALLOWANCE


def test_kinds_of_steps_have_costs_of_their_own(clock: FakeClock) -> None:
    """A large tree is not judged by the cost of small ones, nor a long draft by that of a short."""
    steps = Steps(clock, known())
    for rows, forwards, seconds in ((2, 0, 1.1), (16, 0, 2.0), (5, 4, 4.0), (5, 3, 3.0)) * 2:
        steps.draft(seconds, 4, rows, forwards=forwards)
    found = [steps.costs.of(kind) for kind in ((2, 0), (5, 0), (3, 4), (3, 3))]
    assert found == pytest.approx([1.1, 2.0, 4.0, 3.0])


def test_tokens_of_a_batch_are_counted_per_unfinished_row(clock: FakeClock) -> None:
    steps = Steps(clock, known(), Account(balance=0.5))
    steps.draft(1.5, emitted=[3, 0, 1])
    steps.draft(1.5, emitted=[3, 0, 1])
    assert steps.account.balance == 0.5 + 2 - 1.5


def test_switched_off_it_does_nothing(clock: FakeClock) -> None:
    stats, costs, account = SpecStats(), Costs(), Account(balance=-3.0, paused=True)
    one = Controller(stats, History(account, {None: costs}), None, enabled=False)
    for _ in range(50):
        assert one.speculate()
        one.observe(5, [1], 9.0)
    assert (costs, account) == (Costs(), Account(balance=-3.0, paused=True))
    assert stats.num_fallback_steps == 0 and one.details() == {}


def test_details(clock: FakeClock) -> None:
    steps = Steps(clock, known())
    nothing = {"predicted_speedup": None, "plain_seconds": 1.0, "speculative_seconds": None}
    assert steps.one.details() == {"controller": {**nothing, "falls_back": False}}
    for _ in range(3):
        steps.draft(1.5, emitted=3)
    found = steps.one.details()["controller"]
    assert found == {
        "predicted_speedup": 2.0, "plain_seconds": 1.0, "speculative_seconds": 1.5,
        "falls_back": False,
    }  # fmt: skip
    while not steps.account.paused:
        if steps.costs.age < steps.costs.look:
            steps.draft(3.0)
        else:
            steps.plain()
    found = steps.one.details()["controller"]
    assert found["falls_back"] and found["predicted_speedup"] < 2.0
    json.dumps(steps.stats.to_dict())


# -- memory ------------------------------------------------------------------------------------


def test_a_later_call_starts_wiser(clock: FakeClock) -> None:
    """No plain step is timed anew, and what never paid gets a shorter trial."""
    model = Model()

    def steps() -> Steps:
        made = Steps(clock)
        made.one = controller_for(model, "s", 1, made.stats, True)
        made.costs, made.account = made.one.costs, made.one.account
        return made

    first = steps()
    first.draft(1.5)
    first.plain(), first.plain()
    while not first.account.paused:
        first.draft(1.5)
    trial = 1 + START / 0.5
    assert first.account.balance == pytest.approx(START - 0.5 * trial)

    second = steps()  # still in debt
    second.plain()
    assert second.account.paused
    while second.account.balance < FRESH:
        second.plain()
    assert second.account.paused  # within a call more is asked for
    third = steps()
    third.draft(1.5)
    assert third.account.paused and third.stats.num_fallback_steps == 0


def test_what_is_remembered_apart() -> None:
    model, other, stats = Model(), Model(), SpecStats()
    one = controller_for(model, "s", 1, stats, True)
    assert controller_for(model, "s", 1, stats, True).costs is one.costs
    assert controller_for(model, "s", 2, stats, True).costs is not one.costs
    assert controller_for(model, "s", 2, stats, True).account is one.account
    assert controller_for(model, "t", 1, stats, True).account is not one.account
    assert controller_for(other, "s", 1, stats, True).account is not one.account


def test_a_model_is_not_kept_alive() -> None:
    gc.collect()
    model = Model()
    controller_for(model, "s", 1, SpecStats(), True)
    before = len(memory._left)
    del model
    gc.collect()
    assert len(memory._left) == before - 1


def test_threads_wait_for_each_other() -> None:
    """What is remembered is changed by one thread at a time."""
    inside, leave, order = threading.Event(), threading.Event(), []

    @memory.alone
    def first() -> None:
        inside.set()
        leave.wait(10)
        order.append("first")

    one = threading.Thread(target=first)
    one.start()
    assert inside.wait(10)
    account = History().costs_of
    two = threading.Thread(target=lambda: order.append(account("here")))
    two.start()
    two.join(0.1)
    assert two.is_alive() and not order
    leave.set()
    one.join(10), two.join(10)
    assert order == ["first", Costs()]


# -- the option --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["on", None, 1, 0, "True"])
def test_bad_values_of_the_option(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"fallback={value!r}: must be 'auto', True or False"):
        get_method("prompt_lookup").parse_options({"fallback": value})


@pytest.mark.parametrize(
    ("strategy", "options", "do_sample", "on"),
    [
        ("prompt_lookup", {}, False, True),
        ("prompt_lookup", {}, True, True),  # candidates are not sampled
        ("prompt_lookup", {"acceptance": "typical"}, False, False),
        ("layer_skip", {}, False, True),
        ("layer_skip", {}, True, True),
        ("layer_skip", {"acceptance": "rejection"}, True, False),
        ("layer_skip", {"draft_tokens": "sampled"}, True, False),
        ("space", {"acceptance": "rejection"}, True, False),
        ("space", {}, True, True),
        ("layer_skip", {"acceptance": "rejection"}, False, True),  # greedy: no random numbers
    ],
)
def test_auto_is_on_where_the_output_cannot_depend_on_it(
    strategy: str, options: dict[str, Any], do_sample: bool, on: bool
) -> None:
    parse = get_method(strategy).parse_options
    assert switched_on(parse(options), do_sample) == on
    assert switched_on(parse({**options, "fallback": "auto"}), do_sample) == on
    for chosen in (True, False):
        assert switched_on(parse({**options, "fallback": chosen}), do_sample) == chosen


# -- the loop ----------------------------------------------------------------------------------


class Timed:
    """Turns the clock at every forward of a model: 1 for a row, ``wide`` for several."""

    def __init__(self, clock: FakeClock, wide: float):
        self.clock, self.wide = clock, wide
        self.rows: list[int] = []

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        # With probes a forward is given embeddings.
        given = kwargs["input_ids"] if "input_ids" in kwargs else kwargs["inputs_embeds"]
        self.rows.append(given.shape[1])
        self.clock.now += 1.0 if self.rows[-1] == 1 else self.wide


@pytest.fixture
def timed(clock: FakeClock, fresh: Tiny) -> Iterator[Callable[[float], tuple[Any, Timed]]]:
    """``timed(wide)``: a model of its own, so that nothing is remembered, and its forwards."""

    def make(wide: float) -> tuple[Any, Timed]:
        model, timing = fresh("llama_tied"), Timed(clock, wide)
        model.register_forward_pre_hook(timing, with_kwargs=True)
        return model, timing

    return make


def with_fallback(name: str, **options: Any) -> dict[str, Any]:
    given = STRATEGIES.get(name, {}).get("assistant_kwargs", {})
    return {
        "assistant_strategy": name,
        "assistant_kwargs": {**given, "fallback": True, **options},
    }


INPUTS = {"one": {"input_ids": prompt()}, "ragged": ragged()}
#: Fills the tiny models' context of 128 positions.
GREEDY = {"max_new_tokens": 100, "do_sample": False, "return_dict_in_generate": True}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("retrieval", [False, True])
@pytest.mark.parametrize("name", methods())
def test_expensive_drafts_are_given_up(
    timed: Callable[[float], tuple[Any, Timed]], name: str, retrieval: bool, inputs: str
) -> None:
    """A tree costs as much as 30 plain steps: whatever is accepted, drafting does not pay."""
    options = {"retrieval": True} if retrieval and name != "prompt_lookup" else {}
    model, timing = timed(30.0)
    if get_method(name).needs_adapter:
        torch.manual_seed(2)
        model.add_adapter(get_method(name).adapter_config())
    plain = model.generate(**INPUTS[inputs], **GREEDY)
    timing.rows.clear()
    out = model.generate(**INPUTS[inputs], **GREEDY, **with_fallback(name, **options))
    assert out.sequences.tolist() == plain.sequences.tolist()
    stats = out.spec_stats
    report = stats.details["controller"]
    assert report["falls_back"] and report["predicted_speedup"] < 1
    assert report["plain_seconds"] == 1.0 < report["speculative_seconds"]
    assert stats.num_fallback_steps > 0.8 * stats.num_steps
    assert stats.num_steps + stats.num_draft_forwards == len(timing.rows)
    # Rows of one: plain steps that were chosen, empty drafts, and drafting.
    assert timing.rows.count(1) >= stats.num_fallback_steps + stats.num_draft_forwards
    assert sum(stats.accepted_histogram.values()) == stats.num_row_steps


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_drafting_resumes(
    timed: Callable[[float], tuple[Any, Timed]],
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    inputs: str,
) -> None:
    """Drafts are wrong for 15 forwards; from then on they are the strategy's own."""
    model, timing = timed(1.5)
    drafter = get_method(name).drafter
    propose = drafter.propose

    def wrong_at_first(self: Any, state: Any) -> Any:
        now, forwards = clock.now, len(timing.rows)
        draft = propose(self, state)
        clock.now = now  # drafting takes no time here
        del timing.rows[forwards:]
        if forwards < 15:
            draft.tokens[:, 1:] = PAD  # which these models do not emit
        return draft

    monkeypatch.setattr(drafter, "propose", wrong_at_first)
    plain = model.generate(**INPUTS[inputs], **GREEDY).sequences
    assert not (plain[:, 12:] == PAD).any()
    timing.rows.clear()
    out = model.generate(**INPUTS[inputs], **GREEDY, **with_fallback(name))
    assert out.sequences.tolist() == plain.tolist()
    kinds = "".join("p" if rows == 1 else "d" for rows in timing.rows[1:])
    pause = re.search("p{15,}", kinds)
    assert pause and "d" in kinds[: pause.start()]
    assert kinds[pause.end() :].count("d") > 3
    assert not out.spec_stats.details["controller"]["falls_back"]


def test_it_is_off_without_being_asked_for_off(
    timed: Callable[[float], tuple[Any, Timed]],
) -> None:
    """``fallback=False`` drafts at every step; left out, the controller is on."""
    model, _ = timed(30.0)
    call = {"input_ids": prompt(), **GREEDY, "assistant_strategy": "prompt_lookup"}
    off = model.generate(**call, assistant_kwargs={"fallback": False}).spec_stats
    assert off.num_fallback_steps == 0 and "controller" not in off.details
    on = model.generate(**call).spec_stats
    assert on.num_fallback_steps > 0 and on.details["controller"]["falls_back"]
    assert on.num_drafted_tokens < off.num_drafted_tokens
    assert hf_spec.last_stats(model) is on


def test_a_second_call_knows_the_costs(timed: Callable[[float], tuple[Any, Timed]]) -> None:
    model, _ = timed(30.0)
    call = {"input_ids": prompt(), **GREEDY, **with_fallback("layer_skip")}
    first = model.generate(**call).spec_stats
    second = model.generate(**call).spec_stats
    assert second.num_draft_forwards < first.num_draft_forwards
    assert second.details["controller"]["plain_seconds"] == 1.0


def test_cheap_drafts_are_kept(timed: Callable[[float], tuple[Any, Timed]]) -> None:
    """Candidates that cost nothing: only the looks at a plain step are without drafts."""
    model, _ = timed(1.0)
    out = model.generate(input_ids=prompt(), **GREEDY, **with_fallback("prompt_lookup"))
    assert out.spec_stats.num_fallback_steps <= 3
    report = out.spec_stats.details["controller"]
    assert not report["falls_back"] and report["predicted_speedup"] > 1.5


def test_seeded_sampling_equals_plain(timed: Callable[[float], tuple[Any, Timed]]) -> None:
    """One draw per emitted token at batch 1 under the match rule, whichever steps draft."""
    for name in STRATEGIES:
        model, _ = timed(4.0)
        settings = {"max_new_tokens": 60, "do_sample": True, "temperature": 0.7, "top_k": 0}
        torch.manual_seed(3)
        plain = model.generate(prompt(), **settings)
        torch.manual_seed(3)
        ours = model.generate(prompt(), **settings, **with_fallback(name))
        assert ours.tolist() == plain.tolist()
        stats = hf_spec.last_stats(model)
        assert 0 < stats.num_fallback_steps < stats.num_steps - 1


def test_merged_statistics_add_up() -> None:
    one, two = SpecStats(num_fallback_steps=3), SpecStats(num_fallback_steps=4)
    one.merge(two)
    assert one.num_fallback_steps == one.to_dict()["num_fallback_steps"] == 7


def print_table() -> None:
    """The simulations of docs/controller.md."""
    clock = FakeClock()
    tau_3 = Strategy(1.2, 0.7, 15)
    rows: list[tuple[str, Any, int]] = [
        *((f"never accepted, a step costs {one.cost}", one, 128) for one in NEVER[:-1]),
        ("never accepted, 1.3, four drafts of five empty", NEVER[-1], 128),
        *((f"tau {s.tau:.1f}, a step costs 1.2", s, 128) for s in (Strategy(1.2, 1 / 6), *PAYING)),
        ("nothing, then tau 3.3", lambda at: tau_3 if at >= 256 else Strategy(1.2), 512),
        ("tau 3.3, then nothing", lambda at: tau_3 if at < 256 else Strategy(1.2), 512),
    ]
    for name, strategy, new in rows:
        always = mean(speedups(clock, strategy, new=new, enabled=False))
        found = speedups(clock, strategy, new=new)
        print(f"| {name} | {new} | {always:.2f} | {found[0]:.2f} | {mean(found[1:]):.2f} |")


if __name__ == "__main__":
    print_table()
