"""One model in many threads: every call gives what it gives alone, and leaves nothing behind."""

import random
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import Tiny, prompt, ragged
from recurrent_models import shared_recurrent
from running import fingerprint, needed

from hf_spec import share_steps
from hf_spec.core import verify
from hf_spec.methods.registry import methods
from hf_spec.target.noise import SamplingNoise
from hf_spec.threads import RUNNING

THREADS = 4
GREEDY = {"max_new_tokens": 8, "do_sample": False}
OPTIONS: dict[str, dict[str, Any]] = {"layer_skip": {"skip_attention": [1], "skip_mlp": [0, 2]}}


def calls(names: Iterable[str]) -> list[dict[str, Any]]:
    """A plain call, and each strategy with its default options and with every step drafting."""
    found: list[dict[str, Any]] = [{}]
    for name in names:
        for options in ({}, {"drafting": "always"}):
            kwargs = {**OPTIONS.get(name, {}), **options}
            found.append({"assistant_strategy": name, "assistant_kwargs": kwargs, **needed(name)})
    return found


@pytest.mark.parametrize("shares", [False, True])
def test_every_strategy(fresh: Tiny, shares: bool) -> None:
    """With an untrained adapter of every type that needs one, all of them active; ``shares``: calls
    share their steps."""
    model = fresh("llama_tied")
    torch.manual_seed(2)
    names = [name for name, method in methods().items() if method.needs_adapter]
    for name in names:
        model.add_adapter(methods()[name].adapter_config(), adapter_name=name)
    model.set_adapter(names)
    with share_steps(model, max_rows=5) if shares else nullcontext():
        check_threads(model.eval(), calls(methods()))


def test_recurrent_layers() -> None:
    """Whose functions calls with and without a strategy share."""
    check_threads(shared_recurrent("qwen3_5_text"), calls(["prompt_lookup", "layer_skip"]))


def check_threads(model: Any, kinds: list[dict[str, Any]]) -> None:
    """Calls are as alone: each thread makes a quarter of them, in an order of its own."""
    inputs = [{"input_ids": prompt(12, seed=1)}, ragged((9, 4))]
    work = [(call, inputs[number // 2 % 2]) for number, call in enumerate(kinds)]
    plain = [model.generate(**given, **GREEDY).tolist() for given in inputs]
    wanted = [plain[number // 2 % 2] for number in range(len(work))]
    assert [model.generate(**given, **GREEDY, **call).tolist() for call, given in work] == wanted
    before, config = fingerprint(model), model.config.to_json_string()
    barrier = threading.Barrier(THREADS)

    def run(index: int) -> list[int]:
        barrier.wait()
        order = random.Random(index).sample(range(len(work)), -(-len(work) // 4))
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


@pytest.mark.parametrize(
    "draw",
    [lambda: verify.sample(torch.ones(1, 5)), lambda: SamplingNoise(2, torch.device("cpu"))],
    ids=["a token", "seeds"],
)
def test_nothing_is_drawn_while_another_thread_records(draw: Any) -> None:
    """By the default generator, for which a capture on a GPU notes what it draws."""
    with RUNNING:
        before = torch.get_rng_state()
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and torch.equal(torch.get_rng_state(), before)
    thread.join()
    assert not torch.equal(torch.get_rng_state(), before)
