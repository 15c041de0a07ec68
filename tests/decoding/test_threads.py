"""One model in many threads: every call gives what it gives alone, and leaves nothing behind."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prompt, ragged
from running import fingerprint
from transformers import PreTrainedModel

import hf_spec
import modeling_patches
from hf_spec.methods.registry import methods

THREADS, ROUNDS = 8, 1
GREEDY = {"max_new_tokens": 12, "do_sample": False}
OPTIONS: dict[str, dict[str, Any]] = {"layer_skip": {"skip_attention": [1], "skip_mlp": [0, 2]}}
OURS = tuple(str(Path(one.__path__[0])) for one in (hf_spec, modeling_patches))


def calls() -> list[dict[str, Any]]:
    """A plain call, and each strategy with its default options and with every step drafting."""
    found: list[dict[str, Any]] = [{}]
    for name in methods():
        for options in ({}, {"drafting": "always"}):
            kwargs = {**OPTIONS.get(name, {}), **options}
            found.append({"assistant_strategy": name, "assistant_kwargs": kwargs})
    return found


@pytest.fixture
def model(fresh: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """With an untrained adapter of every type that needs one, all of them active."""
    made = fresh("llama_tied")
    torch.manual_seed(2)
    names = [name for name, method in methods().items() if method.needs_adapter]
    for name in names:
        made.add_adapter(methods()[name].adapter_config(), adapter_name=name)
    made.set_adapter(names)
    return made.eval()


def test_calls_in_threads_are_as_alone(model: PreTrainedModel) -> None:
    inputs = [{"input_ids": prompt(12, seed=1)}, ragged((9, 4))]
    work = [(call, given) for call in calls() for given in inputs]
    alone = [model.generate(**given, **GREEDY, **call).tolist() for call, given in work]
    plain = [model.generate(**given, **GREEDY).tolist() for given in inputs]
    assert alone == plain * len(calls())
    before, config = fingerprint(model), model.config.to_json_string()
    barrier = threading.Barrier(THREADS)

    def run(index: int) -> list[int]:
        barrier.wait()
        order = torch.randperm(len(work), generator=torch.Generator().manual_seed(index)).tolist()
        wrong = []
        for at in order * ROUNDS:
            call, given = work[at]
            if model.generate(**given, **GREEDY, **call).tolist() != alone[at]:
                wrong.append(at)
        return wrong

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            wrong = list(pool.map(run, range(THREADS)))
    finally:
        sys.setswitchinterval(interval)
    assert wrong == [[]] * THREADS
    assert fingerprint(model) == before and model.config.to_json_string() == config
    assert [model.generate(**given, **GREEDY).tolist() for given in inputs] == plain


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of ours that the thread executes."""

    def __init__(self, line: int):
        self.left = line
        self._before: dict[Any, int] = {}

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        code, line = frame.f_code, frame.f_lineno
        if not code.co_filename.startswith(OURS):
            return None
        if event == "line":
            # The way back to a `with` leaves it; no signal arrives there, and a trace that raises
            # there would skip its exit.
            leaves = linecache.getline(code.co_filename, line).lstrip().startswith("with ")
            leaves = leaves and self._before.get(frame, 0) > line
            self._before[frame] = line
            self.left -= not leaves
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("name", ["layer_skip", "propd", "bita"])
def test_an_interrupt_leaves_nothing_behind(model: PreTrainedModel, name: str) -> None:
    kwargs = {**OPTIONS.get(name, {}), "drafting": "always"}
    call = {"assistant_strategy": name, "assistant_kwargs": kwargs}
    few = {**GREEDY, "max_new_tokens": 5}
    plain = model.generate(prompt(), **GREEDY).tolist()
    assert model.generate(prompt(), **few, **call).tolist() == [plain[0][: 12 + 5]]
    count = Interrupt(10**9)
    before = sys.gettrace()
    try:
        sys.settrace(count)
        model.generate(prompt(), **few, **call)
    finally:
        sys.settrace(before)
    lines = 10**9 - count.left
    stopped = 0
    for line in range(1, lines, max(lines // 40, 1)):
        try:
            sys.settrace(Interrupt(line))
            model.generate(prompt(), **few, **call)
        except KeyboardInterrupt:
            stopped += 1
        finally:
            sys.settrace(before)
        assert model.generate(prompt(), **few).tolist() == [plain[0][: 12 + 5]]
    assert stopped > 30
    assert model.generate(prompt(), **GREEDY, **call).tolist() == plain
