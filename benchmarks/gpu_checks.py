"""What :mod:`gpu` checks before it says that steps may be recorded by default: what no test can
show without a GPU. Each check raises, or returns figures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from gpu_model import TRANSFORMERS, Cell, Row, Way, What
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import hf_spec
from hf_spec.core.checks import first_line
from hf_spec.core.stats import SpecStats, synchronize
from hf_spec.target import recording
from hf_spec.target.captures import RECORDERS, Captured
from hf_spec.threads import memory

ROOT = Path(__file__).parents[1]
#: Tests that record CUDA graphs where models are on a GPU, and the seconds that they may take.
TESTS, TESTS_SECONDS = (
    "tests/decoding/test_captured.py", "tests/decoding/test_recording.py",
    "tests/test_method_contract.py",
), 180  # fmt: skip
#: What is asked of the shape of an 8B model: milliseconds of a step, seconds of the first call, how
#: much longer than an eager call one may take in which records are made, and how much faster
#: recorded steps are.
STEP_MS, FIRST_SECONDS, LONGER, FASTER = 7.5, 4.0, 1.1, 1.2
#: Calls in which records are made by default, and how many times as long they are as others: the
#: share of a call that one record takes is small.
CALLS, LONG = 5, 4
_TINY = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip

Check = Callable[[Any], Row]


def tiny(worker: Any, experts: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A model of random weights on the device."""
    torch.manual_seed(0)
    model: Any = (
        MixtralForCausalLM(MixtralConfig(**_TINY, num_local_experts=4, sliding_window=None))
        if experts
        else LlamaForCausalLM(LlamaConfig(**_TINY))
    )
    return model.to(worker.device, dtype).eval()


def same(model: Any, settings: Row | None = None, rows: int = 1) -> SpecStats:
    """Statistics of a call of lookups, whose tokens must be those of plain generation."""
    ids = torch.arange(3, 15, device=model.device).repeat(rows, 2)
    given = {"max_new_tokens": 32, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(ids, **given)
    ours = model.generate(ids, **given, assistant_strategy="prompt_lookup", **(settings or {}))
    assert torch.equal(plain, ours), "other tokens than those of plain generation"
    found = hf_spec.last_stats(model)
    assert found is not None
    return found


@contextmanager
def by_default(**limits: Any) -> Iterator[None]:
    """For the block, steps are recorded without being asked for."""
    with (
        patch.object(recording, "RECORD_BY_DEFAULT", True),
        patch.object(recording, "UNASKED", recording.UNASKED._replace(**limits)),
    ):
        yield


def the_tests(worker: Any) -> Row:
    """The tests of recorded steps with real graphs, whose inputs must exist when they run."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "gpu_liveness", "-p", "no:cacheprovider",
        "--device", str(worker.device), *TESTS,
    ]  # fmt: skip
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    timer = threading.Timer(TESTS_SECONDS, process.terminate)
    timer.start()
    said = process.communicate()[0]
    timer.cancel()
    count = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed)", said)}
    failed = re.findall(r"^FAILED (\S+)", said, re.MULTILINE)
    dots = "".join(re.findall(r"^([.sxFE]+)", said, re.MULTILINE))
    return {
        "passed": count.get("passed", dots.count(".")), "in_time": bool(count),
        "failed": count.get("failed", dots.count("F") + dots.count("E")), "names": failed[:8],
    }  # fmt: skip


def a_failed_capture(worker: Any) -> Row:
    """It leaves no memory behind, earlier records go on, and other threads draw random numbers."""
    device, shared = worker.device, WeakValueDictionary[Any, Tensor]()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    recorder = RECORDERS[device.type](device)
    x = torch.ones(1024, 1024, device=device)

    def fine(x: Tensor) -> tuple[Tensor, ...]:
        return (x @ x + 1,)

    def waits(x: Tensor) -> tuple[Tensor, ...]:
        return (x * float(x.sum()),)

    first = Captured(recorder, fine, [x], 0, shared)
    error = ""
    try:
        Captured(recorder, waits, [x], 0, shared)
    except Exception as raised:  # what CUDA says
        error = first_line(raised)
    assert error, "a wait of the host was captured"
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(lambda: torch.rand(8, device=device).cpu()).result()
    torch.cuda.empty_cache()
    assert len(drawn) == 8 and torch.equal(first(2 * x)[0], fine(2 * x)[0]), (
        "a record is wrong afterwards"
    )
    second = Captured(recorder, fine, [x], 0, shared)
    assert torch.equal(second(3 * x)[0], fine(3 * x)[0])
    del first, second, recorder, x
    shared.clear()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved(device) - before
    assert left < 2**26, f"{left / 2**20:.0f} MiB are left"
    return {"said": error, "left_mib": left / 2**20}


def many_streams(worker: Any) -> Row:
    """PyTorch gives out 32 streams in turn: that of records has run before, and has a workspace."""
    device, shared = worker.device, WeakValueDictionary[Any, Tensor]()
    a = torch.randn(512, 512, device=device)
    for _ in range(40):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            a @ a
    torch.cuda.synchronize(device)
    recorder = RECORDERS[device.type](device)
    records = [
        Captured(recorder, lambda x, n=n: (x @ x + n,), [a], 0, shared)  # type: ignore[misc]
        for n in range(3)
    ]
    del records[0]
    others = [torch.full((2**20,), float(n), device=device) for n in range(64)]
    for _ in range(8):
        for n, record in enumerate(records, 1):
            assert torch.allclose(record(a)[0], a @ a + n, atol=1e-2)
    assert all(bool((one == n).all()) for n, one in enumerate(others)), "others' memory was written"
    return {"streams": 40}


def little_memory(worker: Any) -> Row:
    """All but 1 GiB is taken: calls of the large model give the same tokens, whatever fits."""
    device = worker.device
    inputs = worker.subject.prompts(Cell(TRANSFORMERS, context=64))[0]
    given = {"max_new_tokens": 32, "do_sample": False}
    worker.subject.keywords(Cell("plain"))
    eager = worker.model.generate(**inputs, **given, assistant_strategy="plain")
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    filler = torch.empty(max(free - 2**30, 0), dtype=torch.int8, device=device)
    hf_spec.record(worker.model)
    for _ in range(2):
        ours = worker.model.generate(**inputs, **given, assistant_strategy="plain")
        assert torch.equal(ours, eager), "other tokens than without records"
    code = hf_spec.last_stats(worker.model).details["compiled"]
    hf_spec.record(worker.model, False)
    del filler
    return {"runs": code["runs"], "made": code["made"], "refused": code["refused"]}


def experts(worker: Any) -> Row:
    """A mixture of experts records, or is refused by name before anything is captured."""
    found: Row = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny(worker, True, dtype)
        with by_default(wait=2, share=float("inf"), gain=0.0):
            stats = [same(model) for _ in range(3)][-1]
        code = stats.details.get("compiled", {})
        name = str(dtype).removeprefix("torch.")
        found[name] = stats.details.get("not_recorded") or f"{code['runs']} steps recorded"
    return found


def an_interrupt(worker: Any) -> Row:
    """Ctrl+C in a call whose steps are recorded; the next call is right, and records."""
    model, steps = tiny(worker), 0
    hf_spec.record(model)
    same(model)

    def interrupts(ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == 6:
            raise KeyboardInterrupt
        return scores

    interrupts.stateless = True  # type: ignore[attr-defined]
    with suppress(KeyboardInterrupt):
        same(model, {"logits_processor": [interrupts]})
    stats = [same(model) for _ in range(3)][-1]
    code = stats.details["compiled"]
    assert code["runs"] and not code["made"] and not code["refused"], code
    return {"runs": code["runs"]}


def the_default(worker: Any) -> Row:
    """Calls of the large model while records are made by default, beside eager ones."""
    cell = Cell("medusa" if "medusa" in worker.subject.adapters else "prompt_lookup", context=64)
    inputs, given = worker.subject.prompts(cell)[0], worker.subject.keywords(cell)
    given |= {"max_new_tokens": LONG * worker.args.new_tokens, "do_sample": False}
    model, seconds = worker.model, list[float]()

    def call() -> Any:
        synchronize(worker.device)
        began = time.perf_counter()
        tokens = model.generate(**inputs, **given)
        synchronize(worker.device)
        seconds.append(time.perf_counter() - began)
        return tokens

    eager = [call() for _ in range(3)]
    usual, made = min(seconds[1:]), 0
    seconds.clear()
    with by_default():
        for _ in range(CALLS):
            call()
            stats = hf_spec.last_stats(model)
            made += stats.details.get("compiled", {}).get("made", 0)
    return {
        "eager_s": usual, "longest_ratio": max(seconds) / usual, "last_s": seconds[-1],
        "made": made, "runs": stats.details.get("compiled", {}).get("runs", 0),
        "why_not": stats.details.get("not_recorded"), "tokens": eager[0].numel(),
    }  # fmt: skip


#: By name, the quickest first; those that fill the memory, or take long, last.
CHECKS: dict[str, Check] = {
    "a failed capture": a_failed_capture, "many streams": many_streams,
    "an interrupt": an_interrupt, "experts": experts, "the default": the_default,
    "little memory": little_memory, "the tests": the_tests,
}  # fmt: skip
#: Those that only CUDA can answer.
ON_CUDA = ("a failed capture", "many streams", "little memory", "the tests")


def check(name: str, worker: Any) -> Row:
    """The figures of a check."""
    if worker.device.type not in RECORDERS or (name in ON_CUDA and not worker.cuda):
        return {"skipped": f"needs CUDA, and the device is {worker.device}"}
    memory(worker.model).clear()
    return CHECKS[name](worker)


def decisive() -> list[Cell]:
    """All rows that the decision goes by, the checks first."""
    checks = [Cell(name, what=What.CHECK) for name in CHECKS]
    speeds = [(TRANSFORMERS, Way.EAGER), ("medusa", Way.RECORDED), ("medusa", Way.EAGER),
              ("plain", Way.RECORDED)]  # fmt: skip
    return [*checks[:5], *(Cell(name, way, context=512) for name, way in speeds), *checks[5:]]


def verdict(rows: Sequence[tuple[Cell, Row]]) -> list[tuple[bool, str]]:
    """Each condition of recording by default: whether it holds, and what was found."""
    found, rules = dict(rows), list[tuple[bool, str]]()
    for name in CHECKS:
        row = found.get(Cell(name, what=What.CHECK), {"error": "has not run"})
        why = row.get("error") or row.get("skipped")
        rules.append((why is None, f"{name}: {why or 'as it should be'}"))
    tests = found.get(Cell("the tests", what=What.CHECK), {})
    failed = tests.get("failed", 1)
    rules.append((not failed, f"tests that fail: {failed} {tests.get('names', '')}"))
    default = found.get(Cell("the default", what=What.CHECK), {})
    longest, runs = default.get("longest_ratio", torch.inf), default.get("runs", 0)
    rules.append((longest <= LONGER, f"longest call beside an eager one: {longest:.2f} times"))
    rules.append((runs > 0, f"recorded steps of the last call by default: {runs}"))
    speeds = {way: found.get(Cell("medusa", way, context=512), {}) for way in Way}
    recorded, eager = speeds[Way.RECORDED], speeds[Way.EAGER]
    if "error" in recorded:
        rules.append((False, f"medusa, recorded: {recorded['error']}"))
        return rules
    ms, first = recorded.get("ms", torch.inf), recorded.get("first_call_s", torch.inf)
    rules.append((ms <= STEP_MS, f"a recorded step of medusa: {ms:.2f} of {STEP_MS} ms"))
    rules.append((first <= FIRST_SECONDS, f"its first call: {first:.1f} of {FIRST_SECONDS} s"))
    gain = recorded.get("tokens_per_second", 0.0) / eager.get("tokens_per_second", torch.inf)
    rules.append((gain >= FASTER, f"beside eager steps: {gain:.2f} times as fast"))
    return rules


def print_verdict(rows: Sequence[tuple[Cell, Row]]) -> bool:
    """Print the conditions, and what to do; returns whether all hold."""
    rules = verdict(rows)
    for holds, said in rules:
        print("yes " if holds else "NO  ", said)
    decided = all(holds for holds, _ in rules)
    print(
        "\nAll hold: set RECORD_BY_DEFAULT = True in hf_spec/target/recording.py"
        if decided
        else "\nNot all hold: RECORD_BY_DEFAULT stays False"
    )
    return decided
