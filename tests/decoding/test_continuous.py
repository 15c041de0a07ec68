"""Prompts that join a running batch come out as ``generate`` answers them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, prompt, shared
from peft import LoraConfig, get_peft_model
from running import drafting
from test_method_contract import CASES, FIRST, IDS, adapted, strategy
from transformers import (
    CompileConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_spec
from hf_spec.core.cache import TreeCache
from hf_spec.decoding import joining, prefill
from hf_spec.decoding.emission import Emission
from hf_spec.model.tree_forward import TreeForward
from modeling_patches.cache_name import CACHE

Tiny = Callable[..., PreTrainedModel]

PROMPTS = [prompt(length, seed=seed)[0] for seed, length in enumerate((12, 5, 9, 3, 14, 7, 10, 4))]
#: Several tokens end an answer, so that answers are of different lengths.
GREEDY = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [*range(2, 61, 6)]}

LOOKUP = drafting("prompt_lookup")

every_case = pytest.mark.parametrize(("name", "variant"), CASES, ids=IDS)
every_strategy = pytest.mark.parametrize(("name", "variant"), FIRST, ids=[n for n, _ in FIRST])


def alone(model: Any, prompts: Sequence[torch.Tensor], **kwargs: Any) -> list[list[int]]:
    """Plain answers, one call for each prompt."""
    return [
        model.generate(ids[None], attention_mask=torch.ones_like(ids[None]), **kwargs)[0].tolist()
        for ids in prompts
    ]


@cache
def answers(architecture: str = "llama_tied") -> list[list[int]]:
    """Plain greedy answers to all prompts."""
    return alone(shared(architecture), PROMPTS, **GREEDY)


def together(
    model: Any, prompts: Sequence[torch.Tensor], size: int, **kwargs: Any
) -> list[list[int]]:
    """Answers of a batch, in the order of the prompts."""
    batch = hf_spec.Batch(model, size, **kwargs)
    done = list(batch.generate(prompts))
    assert sorted(one.index for one in done) == list(range(len(prompts)))
    assert batch.num_unfinished == 0
    for one in done:
        assert one.sequence[: one.prompt_length].tolist() == prompts[one.index].tolist()
        assert one.new_tokens.tolist() == one.sequence.tolist()[one.prompt_length :]
    return [one.sequence.tolist() for one in sorted(done, key=lambda one: one.index)]


# -- outputs ---------------------------------------------------------------------------------


@every_case
def test_greedy_equals_each_alone(fresh: Tiny, name: str, variant: str) -> None:
    model = fresh("llama_tied")
    plain = answers()
    assert len({len(row) - len(ids) for row, ids in zip(plain, PROMPTS)}) > 3
    with adapted(model, name, variant):
        assert together(model, PROMPTS, 3, **GREEDY, **strategy(name, variant)) == plain


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture(fresh: Tiny, architecture: str) -> None:
    """With probes, which bring slots in front of the tokens along."""
    model = fresh(architecture)
    plain = answers(architecture)
    name, variant = next(case for case in FIRST if case[0] == "bita")
    with adapted(model, name, variant):
        assert together(model, PROMPTS, 3, **GREEDY, **strategy(name, variant)) == plain


@pytest.mark.parametrize("size", [1, 2, 8, 20])
@every_strategy
def test_any_number_of_places(fresh: Tiny, name: str, variant: str, size: int) -> None:
    model = fresh("llama_tied")
    plain = answers()
    with adapted(model, name, variant):
        assert together(model, PROMPTS, size, **GREEDY, **strategy(name, variant)) == plain


@every_strategy
def test_prompts_too_long_for_probes(
    fresh: Tiny, name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some join with predictions, some without."""
    monkeypatch.setattr(prefill, "RIDING", 8)
    model = fresh("llama_tied")
    plain = answers()
    with adapted(model, name, variant):
        assert together(model, PROMPTS, 3, **GREEDY, **strategy(name, variant)) == plain


@every_strategy
def test_the_policy_decides(fresh: Tiny, name: str, variant: str) -> None:
    model = fresh("llama_tied")
    plain = answers()
    spec = {**strategy(name, variant)}
    options = {k: v for k, v in spec.pop("assistant_kwargs").items() if k != "fallback"}
    with adapted(model, name, variant):
        found = together(model, PROMPTS, 3, **GREEDY, **spec, assistant_kwargs=options)
    assert found == plain


class Banned(LogitsProcessor):
    """Rules out what stands at the sequence's first place: each prompt's own."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, :1], -torch.inf)


class Even(StoppingCriteria):
    """Stops behind the third even token."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids % 2 == 0).sum(-1) >= 9


@every_strategy
def test_processors_and_criteria_see_their_own_prompt(fresh: Tiny, name: str, variant: str) -> None:
    model = fresh("llama_tied")
    settings = {
        **GREEDY, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4,
        "logits_processor": LogitsProcessorList([Banned()]),
        "stopping_criteria": StoppingCriteriaList([Even()]),
    }  # fmt: skip
    plain = alone(model, PROMPTS, **settings)
    assert plain != answers()
    with adapted(model, name, variant):
        assert together(model, PROMPTS, 3, **settings, **strategy(name, variant)) == plain


def test_one_place_draws_as_calls_in_turn_do(fresh: Tiny) -> None:
    model = fresh("llama_tied")
    settings = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_p": 0.9}
    torch.manual_seed(5)
    plain = alone(model, PROMPTS, **settings)
    torch.manual_seed(5)
    found = together(model, PROMPTS, 1, **settings, **LOOKUP)
    assert found == plain
    torch.manual_seed(6)
    assert plain != alone(model, PROMPTS, **settings)


def test_sampled_rows_follow_the_distribution(fresh: Tiny) -> None:
    """First two tokens of many samples, against their exact probabilities."""
    model, ids = fresh("llama_tied"), PROMPTS[1]
    settings = {"max_new_tokens": 2, "do_sample": True, "temperature": 0.7, "top_k": 3}
    settings["eos_token_id"] = None
    torch.manual_seed(0)
    rows = together(model, [ids] * 600, 8, **settings, **LOOKUP)
    expected: dict[tuple[int, int], float] = {}
    with torch.no_grad():
        first = (model(ids[None]).logits[0, -1] / 0.7).topk(3)
        for token, chance in zip(first.indices.tolist(), first.values.softmax(-1).tolist()):
            longer = torch.cat([ids, ids.new_tensor([token])])[None]
            second = (model(longer).logits[0, -1] / 0.7).topk(3)
            for other, more in zip(second.indices.tolist(), second.values.softmax(-1).tolist()):
                expected[token, other] = chance * more
    counts = dict.fromkeys(expected, 0)
    for row in rows:
        counts[row[-2], row[-1]] += 1
    chi = sum((counts[key] - 600 * p) ** 2 / (600 * p) for key, p in expected.items())
    assert chi < 26.1  # 8 degrees of freedom, 0.1 %


def test_a_peft_model(fresh: Tiny) -> None:
    model = get_peft_model(fresh("llama_tied"), LoraConfig(target_modules=["q_proj"])).eval()
    plain = alone(model, PROMPTS, **GREEDY)
    assert together(model, PROMPTS, 3, **GREEDY, **LOOKUP) == plain
    assert hf_spec.last_stats(model) is not None


@pytest.mark.parametrize(
    ("name", "variant"), [case for case in FIRST if case[0] in ("medusa", "space")]
)
def test_compiled_steps(fresh: Tiny, name: str, variant: str) -> None:
    model = fresh("llama_tied")
    plain = answers()
    settings = {
        **GREEDY, "cache_implementation": "static",
        "compile_config": CompileConfig(backend="eager"),
    }  # fmt: skip
    with adapted(model, name, variant):
        assert together(model, PROMPTS, 2, **settings, **strategy(name, variant)) == plain
        stats = hf_spec.last_stats(model)
    assert stats is not None and stats.details["compiled"]["made"] > 0


# -- the batch -------------------------------------------------------------------------------


def test_places_are_taken_at_once(fresh: Tiny) -> None:
    """No step runs with a free place while a prompt waits."""
    model = fresh("llama_tied")
    batch = hf_spec.Batch(model, 3, **GREEDY, **LOOKUP)
    for ids in PROMPTS:
        batch.add(ids)
    assert (batch.num_unfinished, batch.num_free) == (8, -5)
    finished = 0
    while batch.num_unfinished:
        finished += len(batch.step())
        assert batch.num_unfinished == len(PROMPTS) - finished
    assert batch.step() == []
    assert batch.stats.num_generated_tokens == sum(
        len(row) - len(ids) for row, ids in zip(alone(model, PROMPTS, **GREEDY), PROMPTS)
    )


def test_prompts_may_come_later(fresh: Tiny) -> None:
    """Also when the batch has been empty, and while it runs out of prompts."""
    model = fresh("llama_tied")
    plain = answers()
    batch = hf_spec.Batch(model, 3, **GREEDY, **LOOKUP)
    found: dict[int, list[int]] = {}
    for index, ids in enumerate(PROMPTS):
        assert batch.add(ids) == index
        for _ in range(2 if index != 4 else 40):
            found |= {one.index: one.sequence.tolist() for one in batch.step()}
    found |= {one.index: one.sequence.tolist() for one in batch.generate(PROMPTS[:2])}
    assert [found[index] for index in range(10)] == [*plain, *plain[:2]]


def test_an_iterator_is_read_as_places_become_free(fresh: Tiny) -> None:
    taken = 0

    def source() -> Any:
        nonlocal taken
        for ids in PROMPTS:
            taken += 1
            yield ids

    batch = hf_spec.Batch(fresh("llama_tied"), 2, **GREEDY, **LOOKUP)
    for done, _ in enumerate(batch.generate(source()), 1):
        assert taken <= done + 2


def test_a_bad_prompt_loses_nothing(fresh: Tiny) -> None:
    model = fresh("llama_tied")
    batch = hf_spec.Batch(model, 3, **GREEDY, **LOOKUP)
    found = {}
    with pytest.raises(ValueError, match=r"prompt of shape \(1, 0\)"):
        for one in batch.generate([*PROMPTS[:2], PROMPTS[0][:0]]):
            found[one.index] = one.sequence.tolist()
    while batch.num_unfinished:
        found |= {one.index: one.sequence.tolist() for one in batch.step()}
    assert [found[index] for index in (0, 1)] == alone(model, PROMPTS[:2], **GREEDY)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("count", [2, 3])
def test_a_prompt_that_fails_loses_no_other(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, count: int, error: type
) -> None:
    """One that ends with its first token comes before it in the same step."""
    model = fresh("llama_tied")
    settings = {**GREEDY, "max_new_tokens": 1}
    batch = hf_spec.Batch(model, 3, **settings, **LOOKUP)
    for ids in PROMPTS[:count]:
        batch.add(ids)
    run, calls = joining.prefill, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error("out of memory")
        return run(*args, **kwargs)

    monkeypatch.setattr(joining, "prefill", failing)
    with pytest.raises(error, match="out of memory"):
        batch.step()
    found = {one.index: one.sequence.tolist() for one in batch.step()}
    plain = dict(enumerate(alone(model, PROMPTS[:count], **settings)))
    if error is RuntimeError:  # an interrupted prompt starts again
        del plain[1]
    assert found == plain


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(TreeForward, "__call__", 3), (Emission, "take", 8), (TreeCache, "commit", 9)],
)
def test_a_step_that_fails_loses_nothing(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, error: type
) -> None:
    """The third of three rows, which finish at different times, is the one whose tokens fail."""
    model = fresh("llama_tied")
    batch = hf_spec.Batch(model, 3, **GREEDY, **LOOKUP)
    run, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error("in the middle of a step")
        return run(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    for ids in PROMPTS[:5]:
        batch.add(ids)
    found: dict[int, list[int]] = {}
    failures = 0
    while batch.num_unfinished:
        try:
            done = batch.step()
        except error:
            failures += 1
            continue
        for one in done:
            assert one.index not in found
            found[one.index] = one.sequence.tolist()
    assert failures == 1
    assert found == dict(enumerate(alone(model, PROMPTS[:5], **GREEDY)))


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"assistant_strategy": None}, "needs a strategy"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask"),
        ({CACHE: object()}, CACHE),
        ({"streamer": object()}, "streamer"),
        ({"output_scores": True}, "output_scores"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ],
)
def test_arguments_of_a_single_call(fresh: Tiny, given: dict[str, Any], message: str) -> None:
    settings = {**LOOKUP, **given}
    with pytest.raises(ValueError, match=message):
        hf_spec.Batch(fresh("llama_tied"), **settings)


def test_prompts_with_several_rows_or_outputs(fresh: Tiny) -> None:
    spec = LOOKUP
    batch = hf_spec.Batch(fresh("llama_tied"), 2, **GREEDY, **spec)
    with pytest.raises(ValueError, match=r"shape \(2, 6\)"):
        batch.add(torch.ones(2, 6, dtype=torch.long))
    for wrong in ("def f(x):", None, {"input_ids": [5]}):
        with pytest.raises(ValueError, match=r"of type \w+: give the token ids"):
            batch.add(wrong)
    with pytest.raises(ValueError, match=r"torch.float32: token ids are whole"):
        batch.add([1.5])
    for outside in (-1, 61):
        with pytest.raises(ValueError, match=f"ids from .*{outside}.*the model's are 0 to 60"):
            batch.add([5, outside])
    assert batch.num_unfinished == 0
    several = hf_spec.Batch(
        fresh("llama_tied"), 2, max_new_tokens=4, do_sample=True, num_return_sequences=2, **spec
    )
    with pytest.raises(ValueError, match="add the prompt several times"):
        several.add(PROMPTS[0])
