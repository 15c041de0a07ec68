"""One model in many threads: every call gives what it gives alone, and leaves nothing behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import prompt, ragged
from running import fingerprint, needed
from transformers import PreTrainedModel

from hf_spec.methods.registry import methods

THREADS = 8
GREEDY = {"max_new_tokens": 8, "do_sample": False}
OPTIONS: dict[str, dict[str, Any]] = {"layer_skip": {"skip_attention": [1], "skip_mlp": [0, 2]}}


def calls() -> list[dict[str, Any]]:
    """A plain call, and each strategy with its default options and with every step drafting."""
    found: list[dict[str, Any]] = [{}]
    for name in methods():
        for options in ({}, {"drafting": "always"}):
            kwargs = {**OPTIONS.get(name, {}), **options}
            found.append({"assistant_strategy": name, "assistant_kwargs": kwargs, **needed(name)})
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
    """Each thread makes a quarter of the calls, in an order of its own."""
    inputs = [{"input_ids": prompt(12, seed=1)}, ragged((9, 4))]
    work = [(call, inputs[number // 2 % 2]) for number, call in enumerate(calls())]
    plain = [model.generate(**given, **GREEDY).tolist() for given in inputs]
    wanted = [plain[number // 2 % 2] for number in range(len(work))]
    assert [model.generate(**given, **GREEDY, **call).tolist() for call, given in work] == wanted
    before, config = fingerprint(model), model.config.to_json_string()
    barrier = threading.Barrier(THREADS)

    def run(index: int) -> list[int]:
        barrier.wait()
        order = torch.randperm(len(work), generator=torch.Generator().manual_seed(index)).tolist()
        order = order[: -(-len(order) // 4)]
        outputs = {at: model.generate(**work[at][1], **GREEDY, **work[at][0]) for at in order}
        return [at for at in order if outputs[at].tolist() != wanted[at]]

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
