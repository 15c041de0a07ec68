"""Requests that come and go, with a strategy: the manager of ``init_continuous_batching``."""

import asyncio
import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import shared
from test_batches import INPUTS, OPTIONS, alone
from test_sharing import PATIENCE, wait_until
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestStatus

import hf_spec
from hf_spec import StepSharing
from hf_spec.decoding.batches import RequestManager
from hf_spec.decoding.loop import on_end

SPEC = hf_spec.SpecConfig("prompt_lookup", **OPTIONS)


def long(**more: Any) -> dict[str, Any]:
    """A request that takes many steps."""
    return {"input_ids": INPUTS[1], "max_new_tokens": 400, "eos_token_id": -1, **more}


def in_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_requests_that_were_added_before_and_later_share_their_steps(sizes: list[int]) -> None:
    model = shared("llama_tied")
    wanted = alone(model)
    manager = model.init_continuous_batching(generation_config=SPEC)
    assert isinstance(manager, RequestManager) and not manager.is_running()
    assert manager.get_result() is None
    names = manager.add_requests(INPUTS[:3])
    manager.start()
    names += [manager.add_request(one, request_id=f"later {one[0]}") for one in INPUTS[3:]]
    found = {}
    for result in manager:  # until it is stopped
        found[result.request_id] = result
        if len(found) == len(INPUTS):
            manager.stop(block=False)
    assert names[:3] == ["req_0", "req_1", "req_2"] and not manager.is_running()
    assert [found[name].generated_tokens for name in names] == wanted
    assert [found[name].prompt_ids for name in names] == INPUTS
    for one in found.values():
        assert one.status is RequestStatus.FINISHED and one.error is None and not one.timestamps
        assert one.created_time <= one.lifespan[0] < one.lifespan[1]
    assert max(sizes) > 1 and StepSharing.of(model) is None
    manager.stop()  # as Transformers', it says that it was not started
    manager.start()  # again
    name = manager.add_request(INPUTS[0])
    assert manager.get_result(name, PATIENCE).generated_tokens == wanted[0]
    manager.destroy()


@pytest.mark.parametrize("most", [1, 2])
def test_the_most_at_once(sizes: list[int], most: int) -> None:
    """In the order of the requests; calls that share their steps already go on doing so."""
    model = shared("llama_tied")
    batching = ContinuousBatchingConfig(max_requests_per_batch=most, max_memory_percent=0.5)
    with (
        hf_spec.share_steps(model) as sharing,
        model.continuous_batching_context_manager(
            generation_config=SPEC, continuous_batching_config=batching, persistent_manager=True
        ) as manager,
    ):
        names = manager.add_requests(INPUTS)
        found = [manager.get_result(timeout=PATIENCE) for _ in names]
        assert StepSharing.of(model) is sharing
    assert max(sizes) == most
    if most == 1:
        assert [one.request_id for one in found] == names
        assert [one.generated_tokens for one in found] == alone(model)


def test_a_stream_has_a_result_for_each_token() -> None:
    """The last one is of the whole answer; others wait for theirs."""
    model = shared("llama_tied")
    wanted = alone(model)
    with model.continuous_batching_context_manager(generation_config=SPEC) as manager:
        names = manager.add_requests(INPUTS, streaming=True, record_timestamps=True)
        for name, tokens in zip(names, wanted):
            results = list(manager.request_id_iter(name))
            ends = range(1, len(tokens) + 1)
            assert [one.generated_tokens for one in results] == [tokens[:end] for end in ends]
            assert [one.is_finished() for one in results] == [end == len(tokens) for end in ends]
            assert all(one.status is RequestStatus.DECODING for one in results[:-1])
            times = results[-1].timestamps
            assert len(times) == len(tokens) and times == sorted(times)
            assert results[-1].lifespan[0] < times[0] <= times[-1] < results[-1].lifespan[1]


def test_options_of_a_request() -> None:
    model = shared("llama_tied")
    given, ids = {**OPTIONS, "repetition_penalty": 1.7}, torch.tensor([INPUTS[0]])
    wanted = model.generate(ids, **given)[0, ids.shape[1] :].tolist()
    whole = model.generate(ids, **{**OPTIONS, "eos_token_id": None})[0, ids.shape[1] :].tolist()
    assert wanted != whole[: len(wanted)]
    with model.continuous_batching_context_manager(generation_config=SPEC) as manager:
        manager.add_request(INPUTS[0], "own", repetition_penalty=1.7)
        manager.add_request(INPUTS[0], "whole", eos_token_id=-1)
        manager.add_request(INPUTS[0], "short", max_new_tokens=3, eos_token_id=[whole[1], 3])
        found = {name: manager.get_result(name, PATIENCE) for name in ("own", "whole", "short")}
        with pytest.raises(ValueError, match="top_q=3 of a request: it is no generation option"):
            manager.add_request(INPUTS[0], top_q=3)
        manager.add_request(**long(request_id="own"))
        with pytest.raises(ValueError, match="request_id='own': it is being answered"):
            manager.add_request(INPUTS[0], "own")
        manager.cancel_request("own")
    assert [found[name].generated_tokens for name in ("own", "whole")] == [wanted, whole]
    assert found["short"].generated_tokens == whole[:2]


def test_several_answers_to_a_prompt() -> None:
    model, config = shared("llama_tied"), copy.deepcopy(SPEC)
    config.update(do_sample=True, num_return_sequences=3, eos_token_id=None, temperature=3.0)
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        assert manager.add_requests(INPUTS[:2]) == ["req_0", "req_1"]
        found = {one.request_id: one for one in (manager.get_result() for _ in range(6))}
    assert {*found} == {
        f"req_{number}{child}" for number in (0, 1) for child in ("", "__child#0", "__child#1")
    }
    assert len({tuple(one.generated_tokens) for one in found.values()}) == 6


def test_a_canceled_request_has_no_result_and_others_go_on() -> None:
    model = shared("llama_tied")
    batching = ContinuousBatchingConfig(max_requests_per_batch=2)
    manager = model.init_continuous_batching(SPEC, batching)
    manager.add_request(INPUTS[0], "never begun")
    manager.cancel_request("never begun")
    manager.start()
    running = [manager.add_request(**long(streaming=True)) for _ in range(2)]
    waits, last = manager.add_request(INPUTS[0], "waits"), manager.add_request(INPUTS[2])
    for name in running:
        assert manager.get_result(name, PATIENCE).status is RequestStatus.DECODING
    manager.cancel_request(waits)
    manager.cancel_request("unknown")
    for name in running:
        manager.cancel_request(name)
    assert manager.get_result(last, PATIENCE).generated_tokens == alone(model)[2]
    for name in running:
        assert all(len(one.generated_tokens) < 400 for one in manager.request_id_iter(name))
    assert manager.get_result("never begun") is manager.get_result(waits) is None
    manager.stop()
    assert manager.get_result() is None


def test_an_error_is_of_its_request_alone() -> None:
    model = shared("llama_tied")
    with model.continuous_batching_context_manager(generation_config=SPEC) as manager:
        names = manager.add_requests([INPUTS[0], [], INPUTS[2]])
        wrong = manager.add_request(INPUTS[0], num_beams=2)
        found = [manager.get_result(name, PATIENCE) for name in (*names, wrong)]
    assert [one.status for one in found[::2]] == [RequestStatus.FINISHED] * 2
    assert [one.status for one in found[1::2]] == [RequestStatus.FAILED] * 2
    assert "no token to continue" in found[1].error and "num_beams" in found[3].error
    wanted = alone(model)
    assert [one.generated_tokens for one in found[::2]] == [wanted[0], wanted[2]]


def test_a_hard_stop_fails_what_is_left() -> None:
    model = shared("llama_tied")
    manager = model.init_continuous_batching(
        SPEC, ContinuousBatchingConfig(max_requests_per_batch=1)
    )
    manager.start()
    names = [manager.add_request(**long(streaming=True)), manager.add_request(INPUTS[0])]
    manager.get_result(names[0], PATIENCE)
    manager.stop(hard_stop=True)
    assert manager.add_request(INPUTS[0]) is None or not manager.is_running()
    found = {one.request_id: one for one in manager if one.is_finished()}
    assert [found[name].status for name in names] == [RequestStatus.FAILED] * 2
    assert all("stopped before this request" in one.error for one in found.values())
    assert 0 < len(found[names[0]].generated_tokens) < 400 and not found[names[1]].generated_tokens


def test_a_stop_ends_with_the_last_answer() -> None:
    model = shared("llama_tied")
    manager = model.init_continuous_batching(SPEC)
    manager.start()
    name = manager.add_request(**long(streaming=True, max_new_tokens=60))
    manager.get_result(name, PATIENCE)
    manager.stop(block=False)
    assert manager.add_request(INPUTS[0]) is None
    manager.join()
    results = list(manager)
    assert results[-1].is_finished() and len(results[-1].generated_tokens) == 60


def test_within_a_pause_no_request_runs() -> None:
    """It waits for those that have begun, and keeps others."""
    model, ended = shared("llama_tied"), []
    manager = model.init_continuous_batching(SPEC)
    with pytest.raises(RuntimeError, match="does not run"), manager.pause():
        raise AssertionError
    manager.start()
    on_end(model, lambda stats, _: ended.append(stats.num_generated_tokens))
    first = manager.add_request(**long(max_new_tokens=50))
    wait_until(lambda: manager._at_work)
    with manager.pause():
        assert ended == [50]
        later = manager.add_request(INPUTS[0])
        time.sleep(0.05)
        assert not manager._at_work
        with pytest.raises(RuntimeError, match="leave the pause first"):
            manager.stop()
    assert len(manager.get_result(later, PATIENCE).generated_tokens) == ended[1]
    assert manager.get_result(first).is_finished()
    manager.stop()
    on_end(model, lambda *_: None)


def test_results_in_an_event_loop() -> None:
    model = shared("llama_tied")
    wanted = alone(model)[0]

    async def ask(manager: RequestManager) -> list[Any]:
        found: asyncio.Queue[Any] = asyncio.Queue()
        manager.register_result_handler("own", found.put_nowait)
        manager.add_request(INPUTS[0], "own", streaming=True)
        results = [await found.get()]
        while not results[-1].is_finished():
            results.append(await found.get())
        return results

    with model.continuous_batching_context_manager(generation_config=SPEC) as manager:
        results = asyncio.run(ask(manager))
        assert manager.get_result(timeout=0) is None and not manager._handlers
    assert [one.generated_tokens[-1] for one in results] == wanted


def test_a_program_that_forgets_to_stop() -> None:
    """Its requests are answered."""
    model = shared("llama_tied")
    manager = model.init_continuous_batching(SPEC)
    manager.start()
    manager.add_request(INPUTS[0])
    assert manager._pool is not None
    manager._pool.shutdown()  # what the interpreter's end does
    assert manager.get_result().is_finished()
    manager.stop()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"num_blocks": 4}, "num_blocks=4 in init_continuous_batching with a strategy"),
        ({"return_logprobs": True}, "return_logprobs=True"),
        ({"num_beams": 2}, "num_beams"),
        ({"assistant_strategy": "oracle"}, "assistant_strategy='oracle': choose"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_at_the_start(given: dict[str, Any], why: str) -> None:
    model, config, batching = shared("llama_tied"), copy.deepcopy(SPEC), None
    (name, value) = next(iter(given.items()))
    if name in vars(ContinuousBatchingConfig()):
        batching = ContinuousBatchingConfig(**given)
    else:
        setattr(config, name, value)
    with pytest.raises(ValueError, match=why):
        model.init_continuous_batching(config, batching)


def test_without_a_strategy_it_is_transformers_own() -> None:
    manager = shared("llama_tied").init_continuous_batching(GenerationConfig(**OPTIONS))
    assert not isinstance(manager, RequestManager)
