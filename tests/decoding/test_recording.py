"""When steps are recorded: where it is asked for, and where the library may by itself."""

import logging
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Tiny, check_same, prompt
from replay import RECORDED
from running import CAPTURED
from test_compiled import adapt, generate, strategy
from transformers import GenerationMixin

import hf_spec
from hf_spec.core.memory import memory
from hf_spec.core.stats import SpecStats
from hf_spec.target import recording
from hf_spec.target.recording import IDLE_STEPS, Hint

SPEC = strategy("prompt_lookup", num_draft_tokens=4)


def same(model: Any, spec: dict[str, Any], **settings: Any) -> SpecStats:
    """Statistics of a call, whose tokens are those of plain generation."""
    settings = {"inputs": prompt(), **settings}
    output = check_same(model, {**spec, "return_dict_in_generate": True}, **settings)
    found: SpecStats = output.spec_stats
    return found


def seeded(model: Any, inputs: Any, given: dict[str, Any]) -> Any:
    """The output of a call with a seed."""
    torch.manual_seed(3)
    return generate(model, inputs, **given)


# -- asked for by `record` ---------------------------------------------------------------------


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("name", ["plain", "medusa", "prompt_lookup"])
def test_all_calls_of_a_model_record(shallow: Tiny, name: str) -> None:
    """As with a ``compile_config`` for it, whose records they use; until it is turned off, which
    frees them."""
    model, spec = adapt(shallow(), name), strategy(name, num_draft_tokens=3)
    if name == "plain":
        spec["assistant_kwargs"] = {}
    assert "compiled" not in same(model, spec).details
    hf_spec.record(model)
    made = [same(model, spec).details["compiled"]["made"] for _ in range(2)]
    assert made[0] and not made[1]
    details = same(model, {**spec, **RECORDED}).details["compiled"]
    assert details["runs"] and not details["made"]
    assert "compiled" not in same(model, {**spec, "disable_compile": True}).details
    hf_spec.record(model, False)
    assert not memory(model)["graphs"].graphs
    assert "compiled" not in same(model, spec).details


@pytest.mark.usefixtures("recorded")
def test_plain_records_a_batch_that_samples(shallow: Tiny) -> None:
    """The tokens of eager steps with the same seed, a launch for each step."""
    model, sampled = shallow(), {"do_sample": True, "top_k": 8, "max_new_tokens": 12}
    given = {"assistant_strategy": "plain", **sampled}
    eager, *recorded = (
        hf_spec.record(model, on) or seeded(model, prompt(batch=3), given)
        for on in (False, True, True)
    )
    assert all(torch.equal(one.sequences, eager.sequences) for one in recorded)
    stats = recorded[-1].spec_stats
    assert stats.details["compiled"]["runs"] == stats.num_steps - 1 == 11
    assert "recorded steps: code ran 11 times, 0 made" in str(stats)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("way", "why"),
    [
        ({"disable_compile": True}, "disable_compile=True"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"prune": True}, "prune=True"),
    ],
)
def test_calls_that_cannot_record_run_without(
    shallow: Tiny, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    way: dict[str, Any], why: str,
) -> None:  # fmt: skip
    """And say so where someone looks."""
    # There is no other rank to ask.
    monkeypatch.setattr(
        GenerationMixin, "_has_unfinished_sequences", lambda self, ended, *_, **__: not ended
    )
    prunes = way.pop("prune", False)
    model = adapt(shallow(layers=2), "propd") if prunes else shallow()
    spec = strategy("propd", prune=True) if prunes else SPEC
    hf_spec.record(model)
    with caplog.at_level(logging.WARNING):
        stats = same(model, {**spec, **way})
    assert "compiled" not in stats.details and not caplog.messages
    assert "no step was recorded: " in str(stats) and why in str(stats)


def test_without_a_device_it_does_nothing(shallow: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    """And says so once."""
    model = shallow()
    for _ in range(2):
        hf_spec.record(model)
    assert [line.count("nothing is recorded") for line in caplog.messages] == [1]
    stats = same(model, SPEC)
    assert "compiled" not in stats.details and "the model is on cpu" in str(stats)
    hf_spec.record(model, False)
    assert "recorded" not in str(same(model, SPEC))


@pytest.mark.usefixtures("recorded")
def test_a_compile_config_of_the_call_comes_first(shallow: Tiny) -> None:
    model = shallow()
    hf_spec.record(model, False)
    assert same(model, {**SPEC, **RECORDED}).details["compiled"]["how"] == "recorded"
    hf_spec.record(model)
    details = same(model, {**SPEC, **CAPTURED}).details["compiled"]
    assert details["how"] == "compiled and recorded"


@pytest.mark.usefixtures("recorded")
def test_warm_up_of_a_model_that_records(shallow: Tiny) -> None:
    model = shallow()
    hf_spec.record(model)
    assert hf_spec.warm_up(model, **SPEC)
    assert not same(model, SPEC).details["compiled"]["made"]


def test_neither_on_nor_off() -> None:
    with pytest.raises(ValueError, match="on=1: must be True or False"):
        hf_spec.record(torch.nn.Linear(1, 1), 1)  # type: ignore[arg-type]


# -- a hint where it is not ----------------------------------------------------------------------


def waits(*shares: float) -> list[bool]:
    """Whether the hint is due after each of some steps of a second, by what they waited."""
    hint = Hint()
    return [hint.due(1.0, share) for share in shares]


def test_the_hint_comes_once() -> None:
    """After steps that hardly wait, one after the other."""
    idle = [0.09] * IDLE_STEPS
    assert waits(*idle, *idle) == [False] * (IDLE_STEPS - 1) + [True] + [False] * IDLE_STEPS
    assert not any(waits(*idle[1:], 0.1, *idle[1:]))
    assert any(waits(*idle[1:], 0.1, *idle))
    assert not any(waits(*[0.5] * 100))


@pytest.fixture
def hint(monkeypatch: pytest.MonkeyPatch) -> Hint:
    """One that was not given, and comes after two steps, of whatever duration."""
    found = Hint()
    monkeypatch.setattr(recording, "_HINT", found)
    monkeypatch.setattr(recording, "IDLE_STEPS", 2)
    monkeypatch.setattr(recording, "IDLE_SHARE", 1e9)
    return found


class Cuda(NamedTuple):
    """What the model is said to be on."""

    device: Any = torch.device("cuda", 0)


@pytest.mark.usefixtures("hint", "hooks_count")
@pytest.mark.parametrize(
    ("way", "hints"),
    [
        ({}, 1), ({"disable_compile": True}, 0), (CAPTURED, 0), ("a hook", 0), ("a CPU", 0),
        ("turned off", 0),
    ],
)  # fmt: skip
def test_who_gets_the_hint(
    shallow: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: Any,
    hints: int,
) -> None:  # fmt: skip
    """Where the model is on CUDA, could be recorded, and is not asked to leave it."""
    model: Any = shallow()
    if way != "a CPU":
        monkeypatch.setattr(recording, "placement", lambda _: Cuda())
    if way == "a hook":
        model.lm_head.register_forward_hook(lambda *_: None)
    if way == "turned off":
        hf_spec.record(model, False)
    given = way if isinstance(way, dict) else {}
    for _ in range(2):
        same(model, {**SPEC, **given})
    found = [line for line in caplog.messages if "the GPU waits for the host" in line]
    assert len(found) == hints
    assert not hints or "hf_spec.record(model) launches those of a step at once" in found[0]
