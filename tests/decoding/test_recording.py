"""When steps are recorded: where it is asked for, and where the library may by itself."""

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import peft
import pytest
import torch
from conftest import ARCHITECTURES, Tiny, check_same, prompt, ragged
from covering import EVERY_CASE
from fake_clock import FakeClock
from replay import RECORDED
from running import CAPTURED, LAYERS, without_pruning
from test_captured import SAMPLED, Accepts, Remembers
from test_compiled import adapt, generate, strategy
from test_method_contract import FIRST, adapted
from test_method_contract import strategy as variant_of
from transformers import GenerationMixin, LogitsProcessor

import hf_spec
from hf_spec.core.device import bucket
from hf_spec.core.stats import SpecStats
from hf_spec.modeling_patches.fingerprint import fingerprint
from hf_spec.target import captures, recording
from hf_spec.target.graphs import CHECKS, Graphs
from hf_spec.target.recording import IDLE_STEPS, REPLAYS, Hint, Recording
from hf_spec.threads import memory

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


# -- by default ----------------------------------------------------------------------------------


@pytest.fixture
def by_default(recorded: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Nobody has to ask, and no time counts: those of tests tell nothing. Gives what sets other
    limits."""

    def limit(**limits: Any) -> None:
        monkeypatch.setattr(recording, "UNASKED", recording.UNASKED._replace(**limits))

    monkeypatch.setattr(recording, "RECORD_BY_DEFAULT", True)
    limit(share=torch.inf, gain=0.0)
    yield limit


def reasons(stats: SpecStats) -> str:
    """Why steps were not recorded."""
    code = stats.details.get("compiled", {})
    return f"{stats.details.get('not_recorded')} {code.get('refused')}"


def test_it_is_not_the_default() -> None:
    """Before a GPU has run what decides it."""
    assert not recording.RECORD_BY_DEFAULT


def test_steps_are_recorded_when_they_have_recurred(
    shallow: Tiny, by_default: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """At their eighth occurrence, and used after two checks; which is said."""
    model, spec = shallow(), {"assistant_strategy": "plain"}
    with caplog.at_level(logging.INFO, "hf_spec"):
        stats = same(model, spec, max_new_tokens=8)  # the first token is the prompt's
        assert stats.details["compiled"]["made"] == stats.details["compiled"]["runs"] == 0
        assert "recorded steps by default: code ran 0 times" in str(stats)
        assert "each has occurred less than 8 times" in str(stats)
        stats = same(model, spec, max_new_tokens=8)
        assert stats.details["compiled"]["made"] == 1 and stats.details["compiled"]["runs"] == 5
        stats = same(model, spec, max_new_tokens=8)
    assert stats.details["compiled"]["made"] == 0 and stats.details["compiled"]["runs"] == 7
    assert "recorded steps by default: code ran 7 times" in str(stats)
    said = [line for line in caplog.messages if "hf_spec.record(model, False)" in line]
    assert len(said) == 1 and all(one.levelno == logging.INFO for one in caplog.records)
    hf_spec.record(model, False)
    assert "compiled" not in same(model, spec, max_new_tokens=8).details


@pytest.mark.parametrize(
    ("name", "settings"), [("medusa", {}), ("prompt_lookup", SAMPLED), ("layer_skip", SAMPLED)]
)
def test_the_same_tokens(
    shallow: Tiny, by_default: Callable[..., None], name: str, settings: dict[str, Any]
) -> None:
    """Where some steps are eager, some are checked, and some are recorded; in a batch that
    shrinks."""
    by_default(wait=3)
    model = adapt(shallow(layers=LAYERS.get(name, 1)), name)
    given = {**strategy(name, num_draft_tokens=3), **settings, "max_new_tokens": 20}
    with_it = [seeded(model, ragged(), given) for _ in range(3)]
    hf_spec.record(model, False)
    eager = seeded(model, ragged(), given)
    assert all(torch.equal(one.sequences, eager.sequences) for one in with_it)
    made, runs = (
        [one.spec_stats.details["compiled"][what] for one in with_it] for what in ("made", "runs")
    )
    assert sum(made) and runs[-1] > runs[0], (made, runs)


def test_on_a_cpu_nothing_is_said(
    shallow: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "RECORD_BY_DEFAULT", True)
    with caplog.at_level(logging.INFO, "hf_spec"):
        stats = same(shallow(), SPEC)
    assert "recorded" not in str(stats) and not caplog.messages
    assert not {"compiled", "not_recorded"} & {*stats.details}


def test_threads(shallow: Tiny, by_default: Callable[..., None]) -> None:
    """They count what recurs together, and share records."""
    by_default(wait=5)
    model: Any = peft.get_peft_model(shallow(), peft.LoraConfig(init_lora_weights=False))
    inputs = [prompt(6 + n, seed=n) for n in range(4)]
    plain = [generate(model, ids).sequences for ids in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda at: generate(model, inputs[at % 4], **SPEC), range(12))]
    assert all(torch.equal(one.sequences, plain[at % 4]) for at, one in enumerate(found))
    assert any(one.spec_stats.details["compiled"]["runs"] for one in found)
    hf_spec.record(model, False)
    assert "compiled" not in generate(model, inputs[0], **SPEC).spec_stats.details


HINDRANCES: dict[str, tuple[Callable[..., Any], str]] = {
    "training": (lambda model, _: model.train(), "training mode"),
    "quantized": (lambda model, _: setattr(model, "hf_quantizer", Quantizer()), "quantized"),
    "not stock": (lambda model, _: foreign(model), "is not as Transformers has made it"),
    "ranks": (
        lambda _, patch: (
            patch.setattr(torch.distributed, "is_initialized", lambda: True),
            patch.setattr(torch.distributed, "get_world_size", lambda: 2),
        ),
        "one of several ranks",
    ),
    "threads": (
        lambda _, patch: (
            patch.setattr(recording, "OF_A_CAPTURE", (99,)),
            patch.setattr(recording.threading, "active_count", lambda: 2),
        ),
        "other threads may draw random numbers",
    ),
    "rocm": (
        lambda _, patch: (
            on_cuda(patch), patch.setattr(torch.version, "hip", "6.4"),
        ),
        "ROCm",
    ),
    "allocator": (
        lambda _, patch: (
            on_cuda(patch),
            patch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync"),
        ),
        "allocator is cudaMallocAsync",
    ),
    "captured": (
        lambda _, patch: (
            on_cuda(patch),
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True),
        ),
        "is captured itself",
    ),
}  # fmt: skip


class Quantizer:
    """One whose weights can be compiled."""

    is_compileable = True


def foreign(model: Any) -> None:
    """Give it a layer of a user's class."""

    class Linear(torch.nn.Linear):
        treats_tokens_alike = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model.lm_head.__class__ = Linear


def on_cuda(patch: pytest.MonkeyPatch) -> None:
    """Reasons see a model on CUDA, with the native allocator."""
    patch.setattr(recording, "placement", lambda _: Cuda())
    patch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("name", HINDRANCES)
def test_where_it_is_not_recorded(
    shallow: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Each reason is said, and steps are as they were."""
    model, (hinder, why) = shallow(), HINDRANCES[name]
    assert _why(model) is None
    hinder(model, monkeypatch)
    with caplog.at_level(logging.INFO, "hf_spec"):
        assert why in str(_why(model)), _why(model)
    assert why in caplog.text
    hf_spec.record(model)  # who asks for it gets it
    assert recording.Recording.of(model, recording.CallFacts(fingerprint(model))).on


def _why(model: Any) -> str | None:
    """Why a call would not be recorded."""
    return recording.Recording.of(model, recording.CallFacts(fingerprint(model))).why


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"rows": 2}, "a batch of 3 rows is larger than 2"),
        ({"slots": 255}, "a context of 256 tokens is longer than 255"),
        ({"cache": 1000}, "a KV cache of 0.0 GiB is larger than"),
        ({"card": 0.5}, "is more than 50% of the device's memory"),
    ],
)
def test_what_is_too_large(
    shallow: Tiny, by_default: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, Any], why: str,
) -> None:  # fmt: skip
    by_default(wait=1, **limits)
    monkeypatch.setattr("hf_spec.target.graphs.memory_size", lambda _: 40_000)
    model = shallow()
    stats = same(model, SPEC, **without_inputs(ragged()))
    assert why in reasons(stats) and why in str(stats)
    assert not stats.details.get("compiled", {}).get("runs")
    kept = memory(model).get("graphs")
    assert kept is None or not kept.graphs


def without_inputs(given: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": given["input_ids"], "attention_mask": given["attention_mask"]}


def test_capacities_of_caches(shallow: Tiny, by_default: Callable[..., None]) -> None:
    """A cache has a quarter more slots than it needs, at most; not up to twice as many."""
    assert [bucket(n, 4) for n in (1, 5, 9, 17, 256, 257, 1100, 2056)] == [
        1, 5, 10, 20, 256, 320, 1280, 2560
    ]  # fmt: skip
    model: Any = shallow()
    model.config.max_position_embeddings = 512
    by_default(wait=1)
    sizes = []
    for on in (None, True):
        memory(model).clear()
        if on:
            hf_spec.record(model)
        same(model, SPEC, inputs=prompt(260))
        sizes.append({one.shape[3] for one in memory(model)["graphs"].spare})
    assert sizes == [{384}, {512}]


@pytest.mark.usefixtures("recorded")
def test_buffers_that_are_kept_by_default(shallow: Tiny) -> None:
    """No more than the limit of a cache: where someone asks, twice as much as the call used."""
    model, found = shallow(), []
    for own in (Recording(True), recording_of(cache=100)):
        graphs = Graphs(model, RECORDED["compile_config"], "a test", own)
        memory(model)["graphs"].spare.clear()
        graphs.spare([torch.zeros(20), torch.zeros(4), torch.zeros(20)])
        found.append([one.nbytes for one in memory(model)["graphs"].spare])
    assert found == [[80, 16, 80], [80, 16]]


def test_batches_that_calls_share_by_default() -> None:
    """They are no larger than those of one call, but where someone asks."""
    buffer = (1, 32, 2, 64, 8), 100, None
    assert recording.UNASKED.why_not(*buffer) == "a batch of 32 rows is larger than 16"
    assert recording.ASKED.why_not(*buffer) is None


def test_the_first_failure_ends_it(
    shallow: Tiny, by_default: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """For the model, in all calls, without what was recorded before; where someone has asked,
    others are tried."""
    by_default(wait=2)
    monkeypatch.setitem(captures.RECORDERS, "cpu", Accepts)
    model = adapt(shallow(), "medusa")
    with caplog.at_level(logging.INFO, "hf_spec"):
        stats = same(model, strategy("medusa", num_draft_tokens=3))
        assert stats.details["compiled"]["made"] == 1 and "something else" in reasons(stats)
        assert not memory(model)["graphs"].graphs and not memory(model)["graphs"].spare
        stats = same(model, strategy("prompt_lookup"))
    assert "it went wrong" in reasons(stats) and "compiled" not in stats.details
    assert all(one.levelno == logging.INFO for one in caplog.records)


def test_what_is_no_function_of_its_inputs_ends_it(
    shallow: Tiny, by_default: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right once, and wrong on other inputs."""
    by_default(wait=2)
    monkeypatch.setitem(captures.RECORDERS, "cpu", Remembers)
    model = adapt(shallow(), "medusa")
    stats = same(model, strategy("medusa", num_draft_tokens=3))
    assert stats.details["compiled"]["runs"] == 0 and "something else" in reasons(stats)


class Short(LogitsProcessor):
    """Lacks memory after some calls."""

    stateless = True

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise torch.OutOfMemoryError("CUDA out of memory, of a processor")
        return scores


def test_any_shortage_of_memory_frees_all(shallow: Tiny, by_default: Callable[..., None]) -> None:
    """Whoever lacks it, also where no step runs; and ends it for the model."""
    by_default(wait=2)
    model = shallow()
    same(model, {"assistant_strategy": "plain"})
    kept = memory(model)["graphs"]
    assert kept.graphs and kept.spare
    with pytest.raises(torch.OutOfMemoryError, match="of a processor"):
        generate(model, prompt(), **SPEC, logits_processor=[Short(3)])
    assert not kept.graphs and not kept.spare
    stats = same(model, {"assistant_strategy": "plain"})
    assert "memory" in reasons(stats) and not kept.graphs


def test_a_shortage_of_others_frees_all(
    shallow: Tiny, by_default: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next call: a training step in between lacked memory. PyTorch tells of it."""
    monkeypatch.setattr(captures, "_SHORTAGES", Counter({0: 1}))
    by_default(wait=2)
    model, spec = shallow(), {"assistant_strategy": "plain"}
    for _ in range(2):
        assert same(model, spec).details["compiled"]["runs"]
    observers: list[Any] = []
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False
    )
    captures._note_shortages.__wrapped__()
    observers[0](0, 2**30, 2**20, 0)
    assert "elsewhere in the process" in reasons(same(model, spec))
    assert not memory(model)["graphs"].graphs and not memory(model)["graphs"].spare
    assert "it went wrong" in reasons(same(model, spec))


# -- how much it may take ------------------------------------------------------------------------


def recording_of(steps: int = 0, **limits: Any) -> Recording:
    """Of a model that has taken so many steps of a second."""
    found = Recording(True, recording.UNASKED._replace(**limits), by_default=True)
    for _ in range(steps):
        found.observe(1.0, 1.0, made=False)
    return found


def test_making_takes_a_share_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tenth: before any is made, one is expected to take eight steps; then, what the dearest
    took."""
    clock = FakeClock()
    monkeypatch.setattr(recording.time, "monotonic", clock)
    own = recording_of()
    due = []
    for _ in range(200):
        own.ran("a", False)
        own.observe(1.0, 1.0, made=False)
        due.append(own.is_due("a", list))
    assert due.index(True) == 79, "a tenth of 80 seconds is eight"
    with own.making():
        clock.now += 15.0
    assert not own.is_due("a", list)  # 15 made, 15 expected, a tenth of 200 is 20
    own.observe(101.0, 1.0, made=False)
    assert own.is_due("a", list)
    own.observe(1e9, 1.0, made=True)
    assert own._past.decoding == 301, "steps that make records are none"


def test_rare_steps_are_not_recorded() -> None:
    own = recording_of(steps=100)
    found = [[own.is_due(key, list) for key in "abc"] for _ in range(8)]
    assert found == [[False] * 3] * 7 + [[True] * 3]
    for number in range(5000):
        assert not own.is_due(number, list)
    assert len(own._past.seen) <= recording.COUNTED and own.is_due("a", list)


def test_a_full_store_changes_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record makes room for another one once it has not run for a minute, so that mixed loads
    settle."""
    clock = FakeClock()
    monkeypatch.setattr(recording.time, "monotonic", clock)
    own = recording_of(steps=100, wait=1)
    used = [clock.now - at for at in range(32)]
    assert not own.is_due("a", lambda: used) and own.is_due("a", lambda: used[1:])
    clock.now += 60 - 31
    assert own.is_due("a", lambda: used)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("eager", "stays"), [(1.19, False), (1.25, True)])
def test_records_that_are_not_faster_go(shallow: Tiny, eager: float, stays: bool) -> None:
    """By the medians of eager and of recorded steps; steps of both kinds tell nothing."""
    own, x = recording_of(steps=100, wait=1), torch.zeros(3)
    graphs = Graphs(shallow(), RECORDED["compile_config"], "a test", own)

    def step(seconds: float, beside: bool = False) -> bool:
        """Take one, in which something else runs that is not recorded; whether it was."""
        prepared, runs = graphs.prepared, graphs.counts["runs"]
        x.add_(1)
        graphs.run("add", lambda x: (x + 1,), [x])
        if beside:
            own.ran("other", False)
        own.observe(seconds, 0.0, graphs.prepared > prepared)
        return graphs.counts["runs"] > runs

    graphs.obstacle = "a test"
    assert not any(step(seconds) for seconds in (eager, 100.0, eager))
    graphs.obstacle = None
    assert [step(50.0) for _ in range(CHECKS + 1)] == [False, False, True]  # 50: a stall
    for _ in range(REPLAYS - 1):
        assert step(50.0, beside=True) and step(1.0)
    assert step(1.0) == stays and bool(graphs.details()["kept"]) == stays


# -- in many calls -------------------------------------------------------------------------------


def sometimes(every: Sequence[str], some: Sequence[str]) -> Sequence[str]:
    return every if os.environ.get(EVERY_CASE) else some


@pytest.mark.parametrize("architecture", sometimes([*ARCHITECTURES], ["gemma3", "falcon"]))
def test_every_architecture(
    shallow: Any, by_default: Callable[..., None], architecture: str
) -> None:
    """With a layer of each kind that it has, recorded from the middle of a call on, or not at all
    where its steps cannot be."""
    by_default(wait=3)
    layers = 2 if architecture in ("gemma2", "gemma3", "cohere2") else 1
    model = shallow(architecture, layers)
    for _ in range(2):
        stats = same(model, SPEC, **without_inputs(ragged((12, 5))))
    code = stats.details.get("compiled")
    assert code["runs"] if code else "it went wrong" in reasons(stats)
    assert code or architecture == "falcon", "a rotary embedding that the host reads for"


#: One that drafts by programs, and one whose forwards are code of their own.
FEW = [case for case in FIRST if case[0] in ("eagle3", "mtp")]


@pytest.mark.parametrize("name", sometimes([name for name, _ in FIRST], [name for name, _ in FEW]))
def test_every_strategy(shallow: Tiny, by_default: Callable[..., None], name: str) -> None:
    by_default(wait=3)
    model, variant = shallow(layers=LAYERS.get(name, 1)), dict(FIRST)[name]
    spec = without_pruning(variant_of(name, variant))
    with adapted(model, name, variant):
        for _ in range(2):
            stats = same(model, spec, **without_inputs(ragged()), max_new_tokens=20)
    assert stats.details["compiled"]["runs"], str(stats)


@pytest.mark.environment  # half a minute
@pytest.mark.usefixtures("sizes_as_shipped")
def test_a_mixed_load_settles(shallow: Tiny, by_default: Callable[..., None]) -> None:
    """Batches of 1 to 16 rows, greedy and sampled: all records that are kept are made in the first
    calls."""
    model, rng, made = adapt(shallow(), "medusa"), random.Random(0), []
    for _ in range(60):
        rows, length = rng.randint(1, 16), rng.choice([8, 20, 40, 60])
        inputs = ragged(tuple(rng.randint(3, length) for _ in range(rows)))
        spec = {"assistant_strategy": "medusa", "do_sample": rng.random() < 0.5}
        output = generate(model, inputs, **spec, max_new_tokens=24)
        code = output.spec_stats.details["compiled"]
        assert code["kept"] <= 32 and not code["refused"]
        made.append(code["made"])
    assert sum(made) <= 36 and sum(made[-20:]) <= 8, made
