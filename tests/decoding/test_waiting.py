"""``max_rows``: sequences of a call wait until others have ended, and come out the same."""

import re
from typing import Any

import multimodal
import pytest
import torch
from conftest import Tiny, ragged, shared
from processors import ByRow, Criterion, Failure, Matcher, Streamed
from recurrent_models import shared_recurrent
from replay import RECORDED
from running import CAPTURED, drafting
from test_method_contract import FIRST, adapted, strategy
from test_shared import GREEDY, LOOKUP, SKIPPING
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import hf_spec
from hf_spec import RolloutHistory
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.threads import memory

LENGTHS = (12, 5, 9, 3, 7, 10)


def waiting(spec: dict[str, Any], most: int = 2) -> dict[str, Any]:
    return {**spec, "assistant_kwargs": {**spec["assistant_kwargs"], "max_rows": most}}


def check(model: Any, spec: dict[str, Any], **given: Any) -> torch.Tensor:
    """Plain generation's output, of the whole batch."""
    given = {**ragged(LENGTHS), "max_new_tokens": 14, **GREEDY, **given}
    wanted = model.generate(**given)
    found = model.generate(**given, **waiting(spec))
    assert found.tolist() == wanted.tolist()
    return found


@pytest.mark.parametrize(("name", "variant"), FIRST, ids=[name for name, _ in FIRST])
def test_every_strategy(fresh: Tiny, sizes: list[int], name: str, variant: str) -> None:
    model = fresh("llama_tied")
    with adapted(model, name, variant):
        check(model, strategy(name, variant), eos_token_id=[7, 9])
    assert max(sizes) == 2


@pytest.mark.parametrize("spec", [LOOKUP, SKIPPING], ids=["prompt_lookup", "layer_skip"])
@pytest.mark.parametrize("kind", ["gemma3", "gpt2", "qwen3_5_text"])
def test_windows_positions_and_recurrent_states(kind: str, spec: dict[str, Any]) -> None:
    check(shared_recurrent(kind) if kind == "qwen3_5_text" else shared(kind), spec)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},  # of the padding, too
        {"min_new_tokens": 4, "eos_token_id": [7, 9, 11]},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [9, 11]], "eos_token_id": [4, 8]},
        {"max_length": 21, "max_new_tokens": None},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", [LOOKUP, SKIPPING], ids=["prompt_lookup", "layer_skip"])
def test_processors_and_criteria(spec: dict[str, Any], options: dict[str, Any]) -> None:
    check(shared("llama_tied"), spec, **options)


@pytest.mark.parametrize("spec", [LOOKUP, SKIPPING], ids=["prompt_lookup", "layer_skip"])
def test_a_seed_gives_the_same_samples(spec: dict[str, Any]) -> None:
    model, found = shared("llama_tied"), []
    given = {**ragged(LENGTHS), "max_new_tokens": 14, "do_sample": True, "temperature": 1.5}
    for one in (spec, waiting(spec), waiting(spec, 3)):
        torch.manual_seed(5)
        found.append((model.generate(**given, **one).tolist(), torch.rand(1).item()))
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("way", [RECORDED, CAPTURED], ids=["recorded", "compiled"])
def test_recorded_and_compiled_steps(way: dict[str, Any]) -> None:
    """The code is that of three rows, filled up to four."""
    model, spec = shared("llama_tied"), waiting({**LOOKUP, **way}, 3)
    memory(model).pop("graphs", None)
    check(model, spec)
    code = hf_spec.last_stats(model).details["compiled"]
    assert 0 < code["made"] <= code["kept"] and code["runs"] > code["made"]


def test_a_row_takes_the_place_of_one_that_has_ended(sizes: list[int]) -> None:
    """Rows that end early do not wait for the longest."""
    model, spec = shared("llama_tied"), waiting(drafting("plain"), 3)
    given = {**ragged(LENGTHS), "max_new_tokens": 14, **GREEDY, "eos_token_id": [7, 9, 11]}
    out = model.generate(**given, **spec, return_dict_in_generate=True)
    width = max(LENGTHS)
    lengths = [
        1 + next((at for at, token in enumerate(row[width:]) if token in (7, 9, 11)), 13)
        for row in out.sequences.tolist()
    ]
    assert len(set(lengths)) > 2
    # A prompt's forward gives the first token; of steps, each row has one less than tokens.
    ends, steps = [0, 0, 0], 0
    for length in lengths:
        first = min(range(3), key=lambda place: ends[place])
        ends[first] += length - 1
    steps = max(ends)
    assert len(sizes) == steps and sum(sizes) == sum(lengths) - len(lengths)
    stats = out.spec_stats
    assert stats is hf_spec.last_stats(model) and out.get(CACHE) is None
    assert stats.num_generated_tokens == sum(lengths) == stats.num_row_steps
    assert stats.num_steps == len(lengths) + steps
    assert stats.details["shared"] == {"rows": sum(sizes) / steps}
    assert stats.total_seconds > stats.forward_seconds > 0


def test_as_many_rows_as_there_may_be_run_as_one_batch(sizes: list[int]) -> None:
    model = shared("llama_tied")
    given = {**ragged((5, 9)), "max_new_tokens": 4, **GREEDY, **waiting(LOOKUP)}
    out = model.generate(**given, return_dict_in_generate=True)
    assert not sizes and out.get(CACHE) is not None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "typical": ({"acceptance": "typical"}, "acceptance='typical' depends"),
    "history": ({"history": RolloutHistory()}, "history"),
    "grammars": ({"logits_processor": [Matcher()]}, "Matcher"),
    "by row": ({"logits_processor": [ByRow(6)]}, "ByRow"),
    "encoder": ({"encoder_repetition_penalty": 1.2}, "EncoderRepetitionPenalty.* several rows"),
    "criterion": ({"stopping_criteria": [Criterion(None)]}, "Criterion, .* own, may look at"),
    "time": ({"max_time": 9.0, "eos_token_id": None}, "MaxTimeCriteria without an EOS token"),
    "streamer": ({"streamer": Streamed()}, "a streamer gets a token of each row at a time"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores is of all"),
    "cache": ({}, "its cache is the caller's"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_looks_at_several_rows_is_refused(case: str) -> None:
    model, (more, why) = shared("llama_tied"), REFUSED[case]
    spec = waiting(LOOKUP)
    if case in ("typical", "history"):
        spec["assistant_kwargs"] |= more
        more = {}
    given = {**ragged(LENGTHS), "max_new_tokens": 6, **GREEDY}
    if case == "cache":
        out = model.generate(**given, **LOOKUP, return_dict_in_generate=True)
        mask = torch.nn.functional.pad(given["attention_mask"], (0, 6), value=1)
        more = {CACHE: out[CACHE]}
        given |= {"input_ids": out.sequences, "attention_mask": mask}
    with pytest.raises(ValueError, match=f"max_rows.*{why}"):
        model.generate(**{**given, **spec, **more})


@pytest.mark.parametrize("spec", [LOOKUP, SKIPPING], ids=["prompt_lookup", "layer_skip"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside tokens"])
def test_prompts_that_are_embeddings(beside: bool, spec: dict[str, Any]) -> None:
    model, given = shared("llama_tied"), ragged(LENGTHS)
    given["inputs_embeds"] = model.get_input_embeddings()(given["input_ids"])
    check(model, spec, **given if beside else {**given, "input_ids": None})


@pytest.mark.parametrize("kind", ["llama_tied", "gemma3", "qwen3_5_text"])
def test_prompts_in_parts(kind: str) -> None:
    model = shared_recurrent(kind) if kind == "qwen3_5_text" else shared(kind)
    check(model, LOOKUP, prefill_chunk_size=2)


@pytest.mark.parametrize("lengths", [LENGTHS, (4, 4, 4, 4)], ids=["more rows", "as many rows"])
def test_several_positions_per_token(lengths: tuple[int, ...]) -> None:
    """Qwen-VL's positions, which ``generate`` makes: ``(axes, rows, width)``."""
    check(multimodal.build("qwen2_vl"), LOOKUP, **ragged(lengths))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("llava", "with images or the like, which may be of rows: leave max_rows out"),
        ("glmasr", "with the model input 'input_features' of shape"),
    ],
)
def test_images_are_refused(kind: str, given: str) -> None:
    model = multimodal.build(kind)
    with pytest.raises(ValueError, match=f"max_rows {given}"):
        model.generate(**multimodal.prompts(kind, [(1, 9)] * 3), **waiting(LOOKUP))


@pytest.mark.parametrize("most", [0, 1.5, "8"])
def test_it_is_a_number_of_rows(most: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"max_rows={most!r}: must be a whole number")):
        shared("llama_tied").generate(**ragged(LENGTHS), **waiting(LOOKUP, most))


def test_an_error_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = shared("llama_tied"), []
    given = {**ragged(LENGTHS), "max_new_tokens": 6, **GREEDY, "repetition_penalty": 1.3}
    wanted, run = model.generate(**given).tolist(), RepetitionPenaltyLogitsProcessor.__call__

    def fails(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 12:
            raise Failure
        return run(self, *args)

    with monkeypatch.context() as patch, pytest.raises(Failure):
        patch.setattr(RepetitionPenaltyLogitsProcessor, "__call__", fails)
        model.generate(**given, **waiting(LOOKUP))
    assert model.generate(**given, **waiting(LOOKUP)).tolist() == wanted


def test_beside_calls_that_share_their_steps() -> None:
    model = shared("llama_tied")
    with hf_spec.share_steps(model, max_rows=1) as sharing:
        check(model, LOOKUP)
        assert not sharing.rows
