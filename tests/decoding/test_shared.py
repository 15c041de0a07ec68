"""Rows of several calls in one batch, which come and go: each call gives what it gives alone."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import multimodal
import pytest
import torch
from conftest import Tiny, prompt, ragged, shared
from processors import Matcher
from recurrent_models import shared_recurrent
from running import drafting, without_pruning
from test_method_contract import FIRST, adapted, strategy
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, TopKLogitsWarper

import hf_spec
from hf_spec.decoding import loop
from hf_spec.decoding.shared import Call, SharedSteps, kind_of, refusal
from hf_spec.draft.learned import Calibration
from hf_spec.draft.policy import Plan, StepPolicy
from hf_spec.target.target import Target

GREEDY: dict[str, Any] = {"do_sample": False}
LOOKUP = drafting("prompt_lookup")
#: Its drafts hit and miss; it asks processors while it drafts, too.
SKIPPING = drafting(
    "layer_skip", skip_attention=[1], skip_mlp=[], draft_exit="fixed", num_draft_tokens=3
)

Request = dict[str, Any]


class Begun(Exception):
    """Carries the steps of a call whose prompt has run."""


def begun(model: Any, request: Request, seed: int) -> Call:
    def take(steps: Any, *_: bool) -> None:
        raise Begun(steps)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Begun) as raised:
        for name in ("_take_all", "take_filled_up"):
            patch.setattr(loop, name, take)
        torch.manual_seed(seed)
        model.generate(**request)
    call = Call(raised.value.args[0])
    steps = call.steps
    assert refusal(steps.strategy, steps.owner, call.scorer) is None
    return call


@torch.no_grad()
def together(model: Any, requests: Sequence[Request], seed: int = 0, most: int = 4) -> list[Call]:
    """The requests' calls when they have ended, that arrive at random steps, at most so many at
    once."""
    rng, left = random.Random(seed), list(range(len(requests)))
    batch, calls, sizes = None, [], []
    while left or batch:
        while left and (batch is None or len(batch.calls) < most and rng.random() < 0.5):
            number = left.pop(0)
            calls.append(call := begun(model, requests[number], number))
            if not all(call.sequences.now.active):  # its first token was its last
                continue
            if batch is None:
                batch = SharedSteps(call)
            else:
                assert kind_of(call.steps) == kind_of(batch)
                batch.admit(call)
        if batch is not None:
            batch.take()
            sizes.append(len(batch.sequences.rows))
            batch.release()
            batch = batch if batch.calls else None
    assert max(sizes) > 2 and len(set(sizes)) > 1
    return calls


def answers(calls: Sequence[Call]) -> list[Any]:
    """Their tokens; or their errors."""
    return [call.error or call.sequences.finish().tolist() for call in calls]


def alone(model: Any, requests: Sequence[Request]) -> Iterator[Any]:
    for number, request in enumerate(requests):
        torch.manual_seed(number)
        yield model.generate(**request).tolist()


def of_all(requests: Sequence[Request], **more: Any) -> list[Request]:
    return [{**request, **more} for request in requests]


def requests(count: int = 6, seed: int = 0, longest: int = 12, **given: Any) -> list[Request]:
    """Prompts and answers of different lengths; the third one has two rows."""
    rng, made = random.Random(seed), []
    for number in range(count):
        ids = {"input_ids": prompt(rng.randint(1, 14), seed=number)}
        ids = ragged((9, 4)) if number == 2 else ids
        made.append({**ids, "max_new_tokens": rng.randint(2, longest), **given})
    return made


def fixed_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts do not depend on step times, nor on what other calls have drafted."""

    def best(self: Any, likely: Any, parents: Any, group: int) -> Plan:
        return Plan(min(8, likely.shape[1] - 1), 4 if group else 0)

    monkeypatch.setattr(StepPolicy, "_best", best)
    monkeypatch.setattr(Calibration, "learn", lambda *_: None)


@cache
def plain(architecture: str) -> list[Any]:
    return list(alone(shared(architecture), requests(**GREEDY)))


# -- every strategy --------------------------------------------------------------------------------


EACH = [*FIRST, ("medusa", "recycled")]


@pytest.mark.parametrize(("name", "variant"), EACH, ids=["-".join(one) for one in EACH])
def test_calls_take_the_steps_that_they_take_alone(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, variant: str
) -> None:
    """Same tokens as plain, and same drafts: what is kept of each row has followed it."""

    def counted(stats: hf_spec.SpecStats) -> list[Any]:
        return [stats.num_steps, stats.accepted_histogram, stats.accepted, stats.offered]

    fixed_drafts(monkeypatch)
    model, spec = fresh("llama_tied"), strategy(name, variant)
    if name == "propd":  # early pruning leaves equally many draft tokens in all rows
        spec = without_pruning(spec)
    made, wanted = of_all(requests(**GREEDY), **spec), []
    with adapted(model, name, variant):
        for request in made:
            model.generate(**request)
            wanted.append(counted(hf_spec.last_stats(model)))
        calls = together(model, made)
    assert answers(calls) == plain("llama_tied")
    if name != "token_recycling" and variant != "recycled":  # drafts from what all calls have seen
        assert [counted(call.steps.state.stats) for call in calls] == wanted


# -- models ----------------------------------------------------------------------------------------


def check(model: PreTrainedModel, made: Sequence[Request], wanted: Any = None) -> None:
    wanted = wanted or list(alone(model, made))
    for seed, spec in enumerate((LOOKUP, SKIPPING)):
        assert answers(together(model, of_all(made, **spec), seed)) == wanted


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2"])
def test_windows_and_positions(architecture: str) -> None:
    """Sliding windows, that rows have left by the time others come, and tables of positions."""
    check(shared(architecture), requests(longest=20, **GREEDY))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "mamba2"])
def test_recurrent_states(kind: str) -> None:
    check(shared_recurrent(kind), requests(**GREEDY))


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl"])
def test_images(kind: str) -> None:
    """A mask over the image, three positions per token."""
    rows = [[(1, 8)], [(1, 3)], [(1, 8), (2, 5)], [(2, 6)], [(1, 11)]]
    made = [
        {**multimodal.prompts(kind, one), "max_new_tokens": 4 + 3 * (number % 3), **GREEDY}
        for number, one in enumerate(rows)
    ]
    check(multimodal.build(kind), made)


# -- options of each call --------------------------------------------------------------------------


def test_processors_and_criteria_of_their_own() -> None:
    model = shared("llama_tied")
    own: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5}, {"min_new_tokens": 4, "eos_token_id": 7}, {},
        {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[5], [9, 11]], "eos_token_id": [4, 8]},
        {"suppress_tokens": [*range(3, 30)]},
    ]  # fmt: skip
    check(model, [one | more for one, more in zip(requests(**GREEDY), own)])


@pytest.mark.parametrize("spec", [LOOKUP, SKIPPING], ids=["prompt_lookup", "layer_skip"])
def test_a_processor_that_keeps_a_state(spec: dict[str, Any]) -> None:
    """It is called once for each token of its row."""
    model, calls = shared("llama_tied"), []

    def made() -> list[Request]:
        found = of_all(requests(**GREEDY, eos_token_id=7), **spec)
        for number in (1, 3, 4):
            calls.append(Matcher())
            found[number]["logits_processor"] = [calls[-1]]
        return found

    wanted = list(alone(model, made()))
    assert answers(together(model, made())) == wanted
    assert [one.calls for one in calls[:3]] == [one.calls for one in calls[3:]]


class Changes(LogitsProcessor):
    """Gives scores of another dtype or size; none can be sampled by those from a length on."""

    def __init__(self, change: Callable[[Tensor], Tensor], length: int = 100):
        self.change, self.length = change, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.change(scores) if input_ids.shape[1] < self.length else scores - torch.inf


@pytest.mark.parametrize("change", [Tensor.double, Tensor.half, lambda scores: scores[:, :50]])
def test_scores_of_another_dtype_or_size(change: Callable[[Tensor], Tensor]) -> None:
    made = of_all(requests(**GREEDY), **LOOKUP)
    for number in (1, 3):
        made[number]["logits_processor"] = [Changes(change)]
    model, wanted = shared("llama_tied"), list(alone(shared("llama_tied"), made))
    assert answers(together(model, made)) == wanted


def test_a_token_that_cannot_be_sampled_is_an_error_of_its_call() -> None:
    model, made = shared("llama_tied"), of_all(requests(), **LOOKUP, **TOP_ONE)
    wanted = list(alone(model, made))
    length = made[1]["input_ids"].shape[1] + 5
    made[1]["logits_processor"] = [Changes(Tensor.float, length)]
    found = answers(together(model, made))
    error = found.pop(1)
    assert isinstance(error, RuntimeError) and "probability tensor" in str(error)
    assert found == wanted[:1] + wanted[2:]


#: Sampled, and the same as greedy; processors that treat each row alone.
TOP_ONE: dict[str, Any] = {"do_sample": True, "top_k": 1, "temperature": 0.5, "max_new_tokens": 12}


@pytest.mark.parametrize("way", ["interrupt", "processor"])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_calls_whose_processors_are_the_same_have_errors_of_their_own(
    monkeypatch: pytest.MonkeyPatch, number: int, way: str
) -> None:
    """Their scores are processed together, also where one of them is interrupted in the step."""
    model, made = shared("llama_tied"), of_all(requests(), **LOOKUP, **TOP_ONE)
    wanted = list(alone(model, made))
    batch = SharedSteps(first := begun(model, made[0], 0))
    calls = [first, *(begun(model, request, 0) for request in made[1:])]
    for call in calls[1:]:
        batch.admit(call)
    forward, top_k = Target.forward, TopKLogitsWarper.__call__
    wrong = next(one for one in calls[number].scorer.processors if type(one) is TopKLogitsWarper)

    def interrupts(*args: Any, **kwargs: Any) -> Any:
        calls[number].error = calls[number].error or InterruptedError()
        return forward(*args, **kwargs)

    def raises(self: Any, ids: Tensor, scores: Tensor) -> Tensor:
        if self is wrong or len(scores) > 2:  # of all rows, which are then asked call by call
            raise InterruptedError
        return top_k(self, ids, scores)

    if way == "interrupt":
        monkeypatch.setattr(Target, "forward", interrupts)
    else:
        monkeypatch.setattr(TopKLogitsWarper, "__call__", raises)
    with torch.no_grad():
        while batch.calls:
            batch.take()
            batch.release()
    found = answers(calls)
    assert isinstance(found.pop(number), InterruptedError)
    assert found == wanted[:number] + wanted[number + 1 :]


@pytest.mark.parametrize("spec", [LOOKUP, SKIPPING], ids=["prompt_lookup", "layer_skip"])
def test_seeded_sampling(spec: dict[str, Any]) -> None:
    """Calls of several rows have numbers of their own, by the seed when they begin."""
    model, warm = shared("llama_tied"), iter((0.5, 1.0, 2.0, 1.0, 0.7))
    made = [
        {**ragged((5, 9, 3)[: 2 + number % 2], seed=number), "max_new_tokens": 4 + number,
         "do_sample": True, "temperature": next(warm), "top_k": 40 - number, **spec}
        for number in range(5)
    ]  # fmt: skip
    wanted = list(alone(model, made))
    assert answers(together(model, made, most=2)) == wanted
