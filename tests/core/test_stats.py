"""SpecStats against hand-counted runs, and the Stopwatch against a clock that the test turns."""

import dataclasses
import json
import random

import pytest
import torch
from fake_clock import FakeClock

import hf_spec
from hf_spec.core import stats as module
from hf_spec.core.stats import SpecStats, Stopwatch

SECONDS = ("draft_seconds", "forward_seconds", "verify_seconds", "other_seconds")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    return clock


def test_a_run_counted_by_hand() -> None:
    stats = SpecStats()
    assert (stats.mean_accepted_tokens, stats.acceptance_per_position) == (0.0, [])
    stats.record(1, draft_depth=0, drafted=0)  # prefill
    stats.record(3, draft_depth=2, drafted=5)  # both depths accepted
    stats.record(2, draft_depth=3, drafted=4)  # one of three
    stats.record(1, draft_depth=2, drafted=2)  # none
    assert stats.num_row_steps == 4
    assert stats.num_generated_tokens == 7
    assert stats.num_drafted_tokens == 11
    assert stats.tau == stats.mean_accepted_tokens == 7 / 4
    assert stats.accepted_histogram == {1: 2, 2: 1, 3: 1}
    assert stats.offered == {1: 3, 2: 3, 3: 1}
    assert stats.accepted == {1: 2, 2: 1}
    assert stats.acceptance_per_position == [2 / 3, 1 / 3, 0.0]
    stopped = SpecStats()  # which cuts what is emitted, not what was accepted
    stopped.record(1, draft_depth=3, drafted=3, num_accepted=3)
    assert stopped.accepted_histogram == {1: 1} and stopped.mean_accepted_tokens == 1.0
    assert stopped.acceptance_per_position == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("seed", range(10))
def test_merging_two_runs_equals_one_run_of_both(seed: int) -> None:
    rng = random.Random(seed)
    one, two, whole = (SpecStats(**dict.fromkeys(SECONDS, value)) for value in (1.5, 2.5, 4.0))
    for turn in range(30):
        depth = rng.randint(0, 5)
        record = rng.randint(1, depth + 1), depth, depth * rng.randint(1, 3)
        (one, two)[turn % 2].record(*record)
        whole.record(*record)
    for stats, steps, details in (
        (one, 3, {"both": 0, "0": True}), (two, 4, {"both": 1, "1": True}),
        (whole, 7, {"both": 1, "0": True, "1": True}),
    ):  # fmt: skip
        stats.num_steps = stats.num_draft_forwards = steps
        stats.details = details
    before = two.to_dict()
    one.merge(two)
    assert one == whole and one.total_seconds == 16.0
    one.record(2, 1, 1)
    one.details["both"] = 2
    assert two.to_dict() == before


def test_to_dict_is_json_and_holds_the_derived_figures() -> None:
    stats = SpecStats(num_steps=2, details={"threshold": [0.6]})
    stats.record(3, 2, 4)
    stats.record(1, 2, 4)
    data = stats.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["accepted_histogram"] == {"1": 1, "3": 1}
    assert list(data["accepted_histogram"]) == ["1", "3"]
    assert data["tau"] == data["mean_accepted_tokens"] == 2.0
    assert data["acceptance_per_position"] == [0.5, 0.5]
    assert data["details"] == {"threshold": [0.6]}
    assert {field.name for field in dataclasses.fields(stats)} <= set(data)


def test_printed_statistics_are_a_summary() -> None:
    stats = SpecStats("medusa", num_steps=3, num_plain_steps=1, details={"policy": ["long"] * 1000})
    stats.record(3, 2, 4)
    stats.record(1, 2, 4)
    stats.draft_seconds, stats.forward_seconds, stats.other_seconds = 0.25, 1.0, 0.75
    assert stats.speed_beside_plain is None, "no plain step was timed"
    assert "2.0 tokens per second, 2 s" in str(stats).splitlines()
    stats.plain_seconds = 3.0
    assert str(stats).splitlines() == [
        "medusa: 4 tokens in 3 steps, tau 2.00 (tokens per step and sequence)",
        "2.0 tokens per second, 1.50x its plain steps, 2 s",
        "time: draft 12%, forward 50%, verify 0%, other 38%",
        "8 draft tokens; 1 plain steps",
        "accepted at position 1, 2, ...: ▄ 50% ▄ 50% (of the drafts that reach it)",
    ]
    assert repr(stats) == "SpecStats(tokens=4, steps=3, tau=2.00, seconds=2)"
    assert "long" not in str(hf_spec.SpecGenerateOutput(torch.ones(1, 2), spec_stats=stats))
    stats.merge(stats)
    assert str(stats).startswith("medusa: 8 tokens in 6 steps, tau 2.00")
    assert stats.speed_beside_plain == 1.5


def test_time_outside_phases_is_other(clock: FakeClock) -> None:
    stats = SpecStats()
    watch = Stopwatch(stats, torch.device("cpu"))
    clock.now += 1.0
    for name, seconds in (("draft", 2.0), ("forward", 4.0), ("verify", 8.0), ("draft", 16.0)):
        with watch.phase(name):
            clock.now += seconds
        clock.now += 32.0
    with pytest.raises(KeyError), watch.phase("forward"):
        clock.now += 64.0
        raise KeyError
    watch.step()
    assert (stats.draft_seconds, stats.forward_seconds, stats.verify_seconds) == (18.0, 68.0, 8.0)
    assert stats.other_seconds == 1.0 + 4 * 32.0
    assert stats.total_seconds == clock.now - 100.0


def test_waiting_for_others_is_left_out(clock: FakeClock) -> None:
    stats = SpecStats()
    watch = Stopwatch(stats, torch.device("cpu"))

    def wait() -> None:
        clock.now += 16.0

    between = watch.without(wait)
    clock.now += 1.0
    between()
    with watch.phase("forward"):
        clock.now += 2.0
        between()
        clock.now += 4.0
    assert watch.step() == 7.0
    assert (stats.forward_seconds, stats.other_seconds) == (6.0, 1.0)


def test_a_device_is_not_waited_for(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device has not finished is booked with a later step; the last one waits."""
    done, waits = [0.0], []  # what the device has come to

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:1"
            self.at = clock.now

        def query(self) -> bool:
            return self.at <= done[0]

        def elapsed_time(self, other: "Event") -> float:
            return 1000 * (other.at - self.at)

    def synchronize(device: torch.device) -> None:
        assert device == torch.device("cuda", 1)
        done[0] = clock.now
        waits.append(clock.now)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", "stream of {}".format)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    stats = SpecStats()
    watch = Stopwatch(stats, torch.device("cuda", 1))
    for name, seconds in (("forward", 4.0), ("verify", 1.0)):
        with watch.phase(name):
            clock.now += seconds
    done[0] = clock.now - 1.0  # the forward is over, verification is not
    assert watch.step() == 5.0 and not waits
    assert (stats.forward_seconds, stats.verify_seconds, stats.other_seconds) == (4.0, 0.0, 1.0)
    with pytest.raises(KeyError), watch.phase("draft"):
        clock.now += 2.0
        raise KeyError
    assert watch.step(last=True) == 2.0 and len(waits) == 1
    assert (stats.draft_seconds, stats.verify_seconds, stats.other_seconds) == (2.0, 1.0, 0.0)


def test_phases_are_labels_of_a_profiler_s_trace(monkeypatch) -> None:
    """And cost nothing where none runs."""
    watch = Stopwatch(SpecStats(), torch.device("cpu"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with watch.phase("draft"):
            torch.ones(3).sum()
        with watch.phase("forward"), pytest.raises(ValueError, match="inside"):
            raise ValueError("inside")
    names = [event.key for event in profiler.key_averages()]
    assert {"hf_spec.draft", "hf_spec.forward"} <= {*names} and "hf_spec.verify" not in names
    monkeypatch.setattr("hf_spec.core.stats.record_function", None)
    with watch.phase("verify"):
        pass
