"""Logits processors: those that keep a state per row, as grammar matchers do, and the others."""

from itertools import product
from typing import Any

import pytest
import torch
from covering import covering
from processors import Matcher
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process

from hf_spec.decoding.scoring import ROWWISE, STATELESS

GREEDY = {"max_new_tokens": 24, "do_sample": False}
STRATEGIES: dict[str, dict[str, Any]] = {
    "prompt_lookup": {},
    "layer_skip": {"skip_attention": [1], "skip_mlp": [0]},
}
EOS = 7


class Stateless(Matcher):
    """Says that it looks at its arguments only, which is true of its result."""

    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(input_ids.tolist())
        return scores.masked_fill(torch.arange(scores.shape[1]) % 3 == 0, -torch.inf)


def prompts(batch: int) -> dict[str, Tensor]:
    """Prompts that repeat themselves, so that look-ups hit; left padding in a batch."""
    part = torch.randint(8, 60, (batch, 5), generator=torch.Generator().manual_seed(batch))
    ids = torch.cat([part, part, part], dim=1)
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[1, :4], mask[1, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def spec(strategy: str, **more: Any) -> dict[str, Any]:
    options = {**STRATEGIES[strategy], "drafting": "always", **more}
    return {"assistant_strategy": strategy, "assistant_kwargs": options}


@pytest.mark.parametrize(
    ("strategy", "batch", "eos"),
    covering(product(STRATEGIES, [1, 3], [None, tuple(range(7, 60, 4))])),
)
def test_a_processor_sees_the_calls_of_plain_generation(
    tiny: Any, strategy: str, batch: int, eos: Any
) -> None:
    model, plain, ours = tiny("llama"), Matcher(), Matcher()
    settings = {**prompts(batch), **GREEDY, "eos_token_id": eos and [*eos], "pad_token_id": 0}
    expected = model.generate(**settings, logits_processor=[plain])
    out = model.generate(
        **settings, **spec(strategy), logits_processor=[ours], return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    assert out.sequences.tolist() == expected.tolist()
    assert ours.calls == plain.calls
    assert out.spec_stats.num_drafted_tokens > 0


#: With distributions of its drafts, which are then accepted by the match rule.
SAMPLED = {"acceptance": "rejection", "draft_exit": "fixed"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_samples_of_one_prompt(tiny: Any, strategy: str) -> None:
    """The same seed gives plain generation's sample, and of several samples each fits its state."""
    model, given = tiny("llama"), spec(strategy, **(SAMPLED if strategy == "layer_skip" else {}))
    settings = {**prompts(1), "max_new_tokens": 16, "do_sample": True}
    torch.manual_seed(0)
    expected = model.generate(**settings, logits_processor=[Matcher()])
    torch.manual_seed(0)
    ours = model.generate(**settings, **spec(strategy), logits_processor=[Matcher()])
    assert ours.tolist() == expected.tolist()

    several = Matcher()
    out = model.generate(**settings, **given, logits_processor=[several], num_return_sequences=3)
    width = settings["input_ids"].shape[1]
    for row in out.tolist():
        state = 0
        for token in row[width:]:
            assert (token + state) % 2 == 0
            state = (state * 31 + token + 1) % 1009
    assert [len(call[0]) for call in several.calls] == list(range(width, width + 16))


def test_rows_are_independent_of_a_processor_without_a_state(tiny: Any) -> None:
    model, one, other = tiny("llama"), Stateless(), Matcher()
    counts = {}
    for processor in (one, other):
        settings = {**prompts(3), **GREEDY, "logits_processor": [processor]}
        expected = model.generate(**settings)
        processor.__init__()  # type: ignore[misc]
        out = model.generate(**settings, **spec("prompt_lookup"), return_dict_in_generate=True)
        assert out.sequences.tolist() == expected.tolist()
        counts[type(processor)] = len({len(ids[0]) for ids in processor.calls}), processor.calls
    assert len(counts[Matcher][1]) == counts[Matcher][0]  # one call for each length
    assert len(counts[Stateless][1]) > counts[Stateless][0]


def test_typical_acceptance_is_refused(tiny: Any) -> None:
    with pytest.raises(ValueError, match="acceptance='typical'.*Matcher.*stateless = True"):
        tiny("llama").generate(
            **prompts(1), max_new_tokens=4, do_sample=True, logits_processor=[Matcher()],
            **spec("prompt_lookup", acceptance="typical"),
        )  # fmt: skip


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
