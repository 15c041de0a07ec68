"""``generate_batch()`` with a strategy answers in Transformers' outputs what ``generate`` does."""

from typing import Any

import pytest
import torch
from conftest import prompt, shared
from running import drafting
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

import hf_spec
from hf_spec.decoding.batches import RequestManager
from hf_spec.decoding.shared import SharedSteps

LENGTHS = (12, 5, 9, 3, 7)
INPUTS = [prompt(length, seed=length)[0].tolist() for length in LENGTHS]
LOOKUP = drafting("prompt_lookup")
OPTIONS = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": [7, 9, 11]}


def alone(model: Any) -> list[list[int]]:
    """What plain generation answers to each prompt."""
    given = [torch.tensor([one]) for one in INPUTS]
    return [model.generate(one, **OPTIONS)[0, one.shape[1] :].tolist() for one in given]


@pytest.mark.parametrize(
    "named",
    [
        {"generation_config": hf_spec.SpecConfig("prompt_lookup", **OPTIONS)},
        {"generation_config": GenerationConfig(**OPTIONS), "assistant_strategy": "plain"},
        {
            "generation_config": GenerationConfig(**{**OPTIONS, "max_new_tokens": 2}),
            "max_new_tokens": 14, **LOOKUP,
        },
    ],
    ids=["config", "call", "kwargs"],
)  # fmt: skip
@pytest.mark.parametrize("most", [None, 2])
def test_answers_are_those_of_each_prompt_alone(
    sizes: list[int], named: dict[str, Any], most: int | None
) -> None:
    model = shared("llama_tied")
    if most is not None:
        batching = ContinuousBatchingConfig(max_requests_per_batch=most, max_memory_percent=0.5)
        named = {**named, "continuous_batching_config": batching}
    wanted = alone(model)
    found = model.generate_batch(INPUTS, **named, progress_bar=False)
    assert len(set(map(len, wanted))) > 2
    assert list(found) == [f"req_{number}" for number in range(len(INPUTS))]
    assert [one.generated_tokens for one in found.values()] == wanted
    assert [one.prompt_ids for one in found.values()] == INPUTS
    for name, one in found.items():
        assert one.request_id == name and one.is_finished() and one.error is None
        assert one.created_time <= one.lifespan[0] < one.lifespan[1]
    assert max(sizes, default=0) == (most or 0)  # five are one batch


def test_the_model_s_own_strategy_and_the_call_s_options() -> None:
    """The number of rows may also be an option of the strategy."""
    model, seen = shared("llama_tied").train(), []
    config = hf_spec.SpecConfig("prompt_lookup", {"max_rows": 3}, **OPTIONS)
    wanted = alone(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "generation_config", config)
        take = SharedSteps.take
        patch.setattr(
            SharedSteps, "take", lambda self: (seen.append(self.state.batch_size), take(self))
        )
        found = model.generate_batch(INPUTS)
    assert [one.generated_tokens for one in found.values()] == wanted and max(seen) == 3
    assert model.generate_batch([], **LOOKUP) == {} and not model.training


def test_the_model_s_own_strategy_beside_a_config_without_one() -> None:
    """It counts as in ``generate``, with its options; the config's None turns nothing off."""
    model, seen = shared("llama_tied"), []
    given = GenerationConfig(**OPTIONS)
    wanted = alone(model)
    with pytest.MonkeyPatch.context() as patch:
        options = {"max_rows": 3}
        patch.setattr(model, "generation_config", hf_spec.SpecConfig("prompt_lookup", options))
        take = SharedSteps.take
        patch.setattr(
            SharedSteps, "take", lambda self: (seen.append(self.state.batch_size), take(self))
        )
        found = model.generate_batch(INPUTS, given)
        manager = model.init_continuous_batching(given)
    assert [one.generated_tokens for one in found.values()] == wanted and max(seen) == 3
    assert isinstance(manager, RequestManager)


def test_several_answers_to_a_prompt_have_transformers_names() -> None:
    """Children first, as Transformers orders them."""
    model = shared("llama_tied")
    config = hf_spec.SpecConfig(
        "prompt_lookup", max_new_tokens=5, do_sample=True, num_return_sequences=3,
        eos_token_id=None,
    )  # fmt: skip
    found = model.generate_batch(INPUTS[:2], generation_config=config)
    assert list(found) == [
        f"req_{number}{child}" for number in (0, 1) for child in ("__child#0", "__child#1", "")
    ]
    assert [one.prompt_ids for one in found.values()] == [INPUTS[0]] * 3 + [INPUTS[1]] * 3
    assert all(len(one.generated_tokens) == 5 for one in found.values())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"record_timestamps": True}, "record_timestamps=True in generate_batch"),
        ({"progress_bar": True}, "progress_bar=True"),
        ({"persistent_manager": True}, "persistent_manager=True"),
        ({"top_k": 3}, "top_k=3"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged'"),
        ({"num_blocks": 4}, "num_blocks=4"),
        ({"allow_block_sharing": False}, "allow_block_sharing=False"),
        ({"return_logprobs": True}, "return_logprobs=True"),
        ({"max_time": 3.0}, "max_time=3.0"),
        ({"num_beams": 2}, "num_beams"),
        ({"assistant_strategy": "oracle"}, "assistant_strategy='oracle': choose"),
    ],
    ids=str,
)
def test_options_of_the_paged_cache_are_refused(given: dict[str, Any], why: str) -> None:
    model, named = shared("llama_tied"), dict(LOOKUP)
    (name, value), own = next(iter(given.items())), GenerationConfig(**OPTIONS)
    if name in vars(ContinuousBatchingConfig()):
        named["continuous_batching_config"] = ContinuousBatchingConfig(**given)
    elif name in ("max_time", "num_beams"):
        setattr(own, name, value)
    else:
        named |= given
    with pytest.raises(ValueError, match=why):
        model.generate_batch(INPUTS, generation_config=own, **named)


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        (["a text"], r"inputs\[0\] in generate_batch: 'a text' is no token"),
        ([[1, 2], [3, 61]], r"inputs\[1\] in generate_batch: 61 is no token .* 0 to 60"),
        ([1, 2], r"inputs\[0\] in generate_batch: 1 is no token"),
        ([[]], r"inputs\[0\] in generate_batch: \[\] is no token"),
        ([[1, 2.0]], r"2.0 is no token"),
    ],
    ids=["text", "beyond", "flat", "empty", "float"],
)
def test_what_is_no_list_of_tokens_is_refused(inputs: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        shared("llama_tied").generate_batch(inputs, max_new_tokens=3, **LOOKUP)


def test_prompts_may_be_a_tensor() -> None:
    model, ids = shared("llama_tied"), torch.tensor([INPUTS[1], INPUTS[1][::-1]])
    found = model.generate_batch(ids, GenerationConfig(**OPTIONS), **LOOKUP)
    wanted = model.generate_batch(ids.tolist(), GenerationConfig(**OPTIONS), **LOOKUP)
    tokens = [[one.generated_tokens for one in each.values()] for each in (found, wanted)]
    assert tokens[0] == tokens[1]
