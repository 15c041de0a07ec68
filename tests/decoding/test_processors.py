"""Logits processors: those that keep a state per row, as grammar matchers do, and the others."""

from typing import Any

import pytest
import torch
from conftest import prompt, ragged
from processors import Matcher
from running import drafting
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation import logits_process

from hf_spec.decoding.acceptance import ROWWISE, STATELESS, Scorer

GREEDY = {"max_new_tokens": 24, "do_sample": False}
LOOKUP = drafting("prompt_lookup")


class Stateless(Matcher):
    """Says that it looks at its arguments only, which is true of its result."""

    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(input_ids.tolist())
        return scores.masked_fill(torch.arange(scores.shape[1]) % 3 == 0, -torch.inf)


@pytest.mark.parametrize("eos", [None, list(range(7, 60, 4))], ids=["no end", "ends"])
@pytest.mark.parametrize("given", [{"input_ids": prompt(15)}, ragged()], ids=["one", "three"])
def test_a_processor_sees_the_calls_of_plain_generation(
    tiny: Any, spec: Any, given: Any, eos: Any
) -> None:
    model, plain, ours = tiny("llama"), Matcher(), Matcher()
    settings = {**given, **GREEDY, "eos_token_id": eos}
    expected = model.generate(**settings, logits_processor=[plain])
    out = model.generate(
        **settings, **spec, logits_processor=[ours], return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    assert out.sequences.tolist() == expected.tolist()
    assert ours.calls == plain.calls
    assert out.spec_stats.num_drafted_tokens > 0


def test_samples_of_one_prompt(tiny: Any, spec: Any) -> None:
    """The same seed gives plain generation's sample, and of several samples each fits its state."""
    model = tiny("llama")
    settings = {"input_ids": prompt(15), "max_new_tokens": 16, "do_sample": True}
    found = []
    for strategy in ({}, spec):
        torch.manual_seed(0)
        found.append(model.generate(**settings, **strategy, logits_processor=[Matcher()]).tolist())
    assert found[0] == found[1]

    # With distributions of its drafts, which are then accepted by the match rule.
    if spec["assistant_strategy"] == "layer_skip":
        options = {**spec["assistant_kwargs"], "acceptance": "rejection"}
        spec = {**spec, "assistant_kwargs": options}
    several = Matcher()
    out = model.generate(**settings, **spec, logits_processor=[several], num_return_sequences=3)
    for row in out.tolist():
        state = 0
        for token in row[15:]:
            assert (token + state) % 2 == 0
            state = (state * 31 + token + 1) % 1009
    assert [len(call[0]) for call in several.calls] == list(range(15, 15 + 16))


def test_rows_are_independent_of_a_processor_without_a_state(tiny: Any) -> None:
    """One that has a state is called once for each length."""
    for kind, more in ((Stateless, True), (Matcher, False)):
        processor = kind()
        settings = {**ragged(), **GREEDY}
        expected = tiny("llama").generate(**settings, logits_processor=[kind()])
        ours = tiny("llama").generate(**settings, **LOOKUP, logits_processor=[processor])
        assert ours.tolist() == expected.tolist()
        lengths = [len(ids[0]) for ids in processor.calls]
        assert (len(lengths) > len(set(lengths))) == more


class Script(LogitsProcessor):
    """Forces a text, behind whose end there is nothing to force; but for drafts, all is allowed.

    Args:
        start: length of the prompt.
    """

    drafting = False

    def __init__(self, text: list[int], start: int):
        self.text, self.start, self.calls = text, start, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        place = input_ids.shape[1] - self.start
        if self.drafting and place >= len(self.text):
            return scores
        forced = torch.tensor(self.text[place])
        return torch.full_like(scores, -torch.inf).index_fill(1, forced, 0.0)


@pytest.mark.parametrize("stateless", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("sampled", [True, False])
def test_what_a_processor_cannot_do_behind_a_stop_is_no_error(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, spec: Any, stateless: bool, rows: int, sampled: bool
) -> None:
    """Plain generation stops before it asks; drafts go beyond, as the criterion is asked later."""
    monkeypatch.setattr(Script, "stateless", stateless, raising=False)
    model, ids = tiny("llama"), prompt(9).repeat(rows, 1)
    text, end = ids[0].tolist() * 3, 9 + 27
    settings = {"input_ids": ids, "max_new_tokens": 40, "do_sample": sampled}

    def run(stop: int, **spec: Any) -> Any:
        processor = Script(text, 9)
        criterion = LengthOf(stop)
        try:
            out = model.generate(
                **settings, **spec, logits_processor=[processor], stopping_criteria=[criterion]
            )
        except IndexError:
            return processor.calls
        return out.tolist()

    assert run(end, **spec) == run(end) == [ids[0].tolist() + text] * rows
    plain, ours = run(end + 1), run(end + 1, **spec)  # an error of theirs
    assert plain == len(text) + 1 and (plain == ours or stateless)


def test_an_error_where_drafts_are_rejected_at_random_is_one_of_the_call(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Scorer.__call__

    def noted(self: Any, *given: Any, drafting: bool = False) -> Tensor:
        Script.drafting = drafting
        return process(self, *given, drafting=drafting)

    monkeypatch.setattr(Scorer, "__call__", noted)
    monkeypatch.setattr(Script, "stateless", True, raising=False)
    spec = drafting("layer_skip", skip_attention=[], skip_mlp=[], acceptance="rejection")
    ids = prompt(10)
    processor = Script(ids[0].tolist(), 10)
    with pytest.raises(IndexError):  # of the last token, which follows a draft token
        tiny("llama").generate(
            ids, **spec, max_new_tokens=11, do_sample=True, logits_processor=[processor]
        )


class LengthOf(StoppingCriteria):
    """Ends all rows at a length; asked as code of the user's."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("kind", [Stateless, Matcher])
@pytest.mark.parametrize("change", [Tensor.double, Tensor.half, lambda scores: scores[:, :50]])
def test_scores_of_another_dtype_or_size(tiny: Any, kind: Any, change: Any) -> None:
    class Changed(kind):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return change(super().__call__(input_ids, scores))

    settings = {**ragged(), **GREEDY, "eos_token_id": list(range(7, 60, 4))}
    expected = tiny("llama").generate(**settings, logits_processor=[Changed()])
    ours = tiny("llama").generate(**settings, **LOOKUP, logits_processor=[Changed()])
    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["prompt_lookup", "token_recycling"])
def test_samples_of_scores_of_another_size(tiny: Any, name: str) -> None:
    """What is drafted by the numbers that tokens are sampled with is of the model's vocabulary."""

    class Changed(Stateless):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return super().__call__(input_ids, scores)[:, :50]

    settings = {"input_ids": prompt(15), "max_new_tokens": 24, "do_sample": True}
    found = []
    for strategy in ({}, drafting(name)):
        torch.manual_seed(0)
        out = tiny("llama").generate(**settings, **strategy, logits_processor=[Changed()])
        found.append(out.tolist())
    assert found[0] == found[1]


def test_typical_acceptance_is_refused(tiny: Any) -> None:
    with pytest.raises(ValueError, match="acceptance='typical'.*Matcher.*stateless = True"):
        tiny("llama").generate(
            prompt(), max_new_tokens=4, do_sample=True, logits_processor=[Matcher()],
            **drafting("prompt_lookup", acceptance="typical"),
        )  # fmt: skip


def test_the_first_token_of_typical_acceptance(fresh: Any) -> None:
    """It is chosen by the prompt's tokens alone, of which this one is none."""
    model, ids = fresh("llama"), prompt(9)
    with torch.no_grad():
        model.lm_head.weight[9] = model.model(ids)[0][0, -1]
    given = {"input_ids": ids, "max_new_tokens": 1, "do_sample": False, "repetition_penalty": 50.0}
    plain = model.generate(**given)
    assert 9 not in ids and plain[0, -1] == 9
    lossy = drafting("prompt_lookup", acceptance="typical")
    assert torch.equal(model.generate(**given, **lossy), plain)


def test_every_processor_of_transformers_has_been_looked_at() -> None:
    """A new one counts as one with a state until it is named here or among the stateless ones."""
    stateful = {
        # Calls a function of the user's; keep states of texts; belong to other models and modes.
        "PrefixConstrainedLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor", "WhisperTimeStampLogitsProcessor",
        "WhisperNoSpeechDetection", "ClassifierFreeGuidanceLogitsProcessor",
        "AlternatingCodebooksLogitsProcessor", "BarkEosPrioritizerLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor", "DiaEOSChannelFilterLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
    }  # fmt: skip
    known = {one.__name__ for one in STATELESS} | stateful
    found = {
        name
        for name, one in vars(logits_process).items()
        if isinstance(one, type) and issubclass(one, LogitsProcessor) and one is not LogitsProcessor
    }
    assert found <= known


@pytest.mark.parametrize("kind", ROWWISE)
def test_what_treats_rows_alone(kind: type) -> None:
    """Scores of a row depend on nothing but this row's."""
    arguments: dict[str, Any] = {
        "EpsilonLogitsWarper": {"epsilon": 0.05}, "EtaLogitsWarper": {"epsilon": 0.05},
        "MinPLogitsWarper": {"min_p": 0.1}, "TemperatureLogitsWarper": {"temperature": 0.5},
        "SuppressTokensLogitsProcessor": {"suppress_tokens": [2]},
        "TopKLogitsWarper": {"top_k": 3}, "TopPLogitsWarper": {"top_p": 0.6},
        "TypicalLogitsWarper": {"mass": 0.5},
    }  # fmt: skip
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1)) * 4
    ids = torch.arange(32).reshape(4, 8)
    made = kind(**arguments.get(kind.__name__, {}))
    together = made(ids, logits.clone())
    if kind is not logits_process.InfNanRemoveLogitsProcessor:
        assert not torch.equal(together, logits)
    for row in range(4):
        alone = made(ids[:1, :1], logits[row : row + 1].clone())
        assert torch.equal(together[row : row + 1], alone)
