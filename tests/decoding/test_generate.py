"""``generate()`` with a strategy does what ``generate()`` does, by whatever way it is asked."""

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EOS, PAD, VOCAB, Tiny, check_same, plainly, prompt, ragged
from peft import LoraConfig, get_peft_model
from processors import ByRow
from test_shrinking import forwards
from tiny_checkpoint import make_model, make_tokenizer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    MaxTimeCriteria,
)
from transformers.generation.streamers import BaseStreamer

import hf_spec
from hf_spec.target.target import UNPADS
from hf_spec.threads import memory

Spec = dict[str, Any]

GREEDY = {"max_new_tokens": 16, "do_sample": False}


# -- the ways in -----------------------------------------------------------------------------


def test_keywords_and_configs(tiny: Tiny, spec: Spec, decoded: list[str]) -> None:
    model, name = tiny(), spec["assistant_strategy"]
    plain = check_same(model, spec, inputs=prompt())
    config = hf_spec.SpecConfig(**spec, **GREEDY)
    for given in (config, GenerationConfig(**GREEDY, **spec)):
        assert model.generate(prompt(), generation_config=given).tolist() == plain.tolist()
    # A keyword beside the config wins, as with any other option.
    short = model.generate(prompt(), generation_config=config, max_new_tokens=5)
    assert short.tolist() == plain[:, :17].tolist()
    model.generate(prompt(), generation_config=config, assistant_strategy=None)
    assert decoded == [name] * 4
    assert config.assistant_strategy == name  # the calls changed nothing


@pytest.mark.parametrize("kind", [hf_spec.SpecConfig, GenerationConfig])
def test_default_of_the_model(
    fresh: Tiny, spec: Spec, decoded: list[str], tmp_path: Any, kind: Any
) -> None:
    model = fresh()
    plain = model.generate(prompt(), **GREEDY)
    model.generation_config = kind(**spec, **GREEDY, eos_token_id=None)
    model.save_pretrained(tmp_path)
    for loaded in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert loaded.generate(prompt()).tolist() == plain.tolist()
    assert decoded == [spec["assistant_strategy"]] * 2


@pytest.mark.parametrize("kind", [hf_spec.SpecConfig, GenerationConfig])
def test_a_repository_that_asks_for_a_lossy_rule(
    fresh: Tiny, tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named once, when its options are used; as the default of a model, too."""
    model, folders = fresh(), [tmp_path / "model", tmp_path / "adapter"]
    lossy, said = {"acceptance": "typical"}, "asks for acceptance='typical', which emits other"
    caplog.set_level("WARNING", logger="hf_spec.decoding.call")
    model.generation_config = hf_spec.SpecConfig("prompt_lookup", lossy)
    model.save_pretrained(folders[0])
    model.generation_config.save_pretrained(folders[1])
    config = kind.from_pretrained(folders[1])
    assert config.assistant_kwargs == lossy and said not in caplog.text
    AutoModelForCausalLM.from_pretrained(folders[0]).generate(prompt(), max_new_tokens=4)
    for _ in range(2):
        model.generate(prompt(), generation_config=copy.deepcopy(config), max_new_tokens=4)
    warnings = [one for one in caplog.messages if said in one]
    for message, folder in zip(warnings, folders, strict=True):
        assert message.startswith(f"{folder} {said}")
    config.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert saved["assistant_kwargs"] == lossy


def test_peft_model(fresh: Tiny, spec: Spec, decoded: list[str]) -> None:
    torch.manual_seed(5)
    lora = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(fresh(), lora)
    tuned = check_same(model, spec, input_ids=prompt())
    with model.disable_adapter():
        assert model.generate(prompt(), **GREEDY).tolist() != tuned.tolist()
    assert decoded == [spec["assistant_strategy"]]
    assert hf_spec.last_stats(model).num_generated_tokens == 16


def test_pipeline(spec: Spec, decoded: list[str]) -> None:
    pipe = pipeline("text-generation", model=make_model(layers=3), tokenizer=make_tokenizer())
    chat = [{"role": "user", "content": "abab"}]
    for text in ("to be or not to be or", chat, ["one row", "and a longer row"]):
        settings = {**GREEDY, "batch_size": 2, "max_length": None}
        assert pipe(text, **settings, **spec) == pipe(text, **settings)
    assert len(decoded) == 3


# -- logits processors -----------------------------------------------------------------------


def allowed_by_row(row: int, ids: torch.Tensor) -> list[int]:
    """Tokens depend on the row and on the last token."""
    return [t for t in range(3, VOCAB) if (t + row + int(ids[-1])) % 3]


#: Beside those of test_every_option.py.
PROCESSORS: dict[str, dict[str, Any]] = {
    "min_new_tokens": {"min_new_tokens": 15, "eos_token_id": list(range(3, 40))},
    "bad_words_ids": {"bad_words_ids": [[n] for n in range(20, 40)] + [[7, 8], [41, 42]]},
    "sequence_bias": {"sequence_bias": [[[5], 4.0], [[5, 6], 9.0], [[6, 7], 9.0]]},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": EOS},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed_by_row},
    "by_row": {"logits_processor": LogitsProcessorList([ByRow(3)])},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [5, 6]},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(tiny: Tiny, spec: Spec, name: str) -> None:
    plain = check_same(tiny(), spec, **ragged(), **PROCESSORS[name])
    assert plain.tolist() != plainly(tiny(), **ragged(), **GREEDY).tolist()  # it does something


# -- stopping --------------------------------------------------------------------------------


class StopAt(StoppingCriteria):
    """Stops a row whose last token is divisible by the number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % self.number == 0


@pytest.mark.parametrize("eos", [None, EOS])
def test_criteria(tiny: Tiny, spec: Spec, eos: int | None) -> None:
    """Rows stop at different times; without EOS plain generation lets finished rows run on. Of
    several criteria of a type, each counts."""
    model = tiny()
    token = int(plainly(model, inputs=prompt(), **GREEDY)[0, 18])
    own = [[StopAt(number)] for number in (3, 5, 11)]
    lengths, times = map(MaxLengthCriteria, (20, 18)), map(MaxTimeCriteria, (0.0, 1e6))
    passed = [MaxLengthCriteria(5)]  # before they are asked
    for criteria in (*own, [EosTokenCriteria(token)], [*lengths], [*times], passed):
        given = {"stopping_criteria": StoppingCriteriaList(criteria), "eos_token_id": eos}
        check_same(model, spec, **ragged(), **given)


class StopsAll(StoppingCriteria):
    """Stops all rows once each has had a token divisible by the number, as lm-eval's does with
    texts; records what it is shown."""

    def __init__(self, number: int, rows: int) -> None:
        self.number = number
        self.had = [False] * rows
        self.shown: list[tuple[list[list[int]], list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        last = input_ids[:, -1].tolist()
        best = scores[-1].argmax(-1).tolist()
        best = [best[row] if token != PAD else PAD for row, token in enumerate(last)]
        self.shown.append((input_ids.tolist(), [len(scores), *best]))
        self.had = [had or token % self.number == 0 for had, token in zip(self.had, last)]
        return all(self.had)


@pytest.mark.parametrize("eos", [None, EOS])
def test_a_criterion_that_looks_at_the_whole_batch(tiny: Tiny, spec: Spec, eos: int | None) -> None:
    """Rows get ahead of one another; the criterion sees the columns of plain generation."""
    ends = set()
    for number in (2, 5, 9):
        found = []
        for strategy in ({}, spec):
            criterion = StopsAll(number, rows=3)
            out = tiny().generate(
                **ragged(), **GREEDY, **strategy, eos_token_id=eos, return_dict_in_generate=True,
                output_scores=True,
                stopping_criteria=StoppingCriteriaList([criterion, StopAt(23)]),
            )  # fmt: skip
            found.append((out.sequences.tolist(), criterion.shown, len(out.scores)))
        assert found[1] == found[0]
        ends.add(found[0][2])
    assert len(ends) > 1 and min(ends) < 16  # it did stop them


def test_stop_strings(spec: Spec) -> None:
    model, tokenizer = make_model(layers=3), make_tokenizer()
    tokenizer.padding_side = "left"
    batch = dict(tokenizer(["abcabc", "xyz xyz xyz"], return_tensors="pt", padding=True))
    batch = {key: batch[key] for key in ("input_ids", "attention_mask")}
    free = model.generate(**batch, **GREEDY, eos_token_id=None)
    one = tokenizer.convert_ids_to_tokens(int(free[0, -10]))
    text = tokenizer.decode(free[1, -8:-6])
    stops = [tokenizer.backend_tokenizer.decoder.decode([one]), text]
    stopped = check_same(model, spec, **batch, stop_strings=stops, tokenizer=tokenizer)
    assert stopped.shape[1] < free.shape[1] or (stopped[:, -1] == PAD).any()


def test_max_time(tiny: Tiny, spec: Spec) -> None:
    model = tiny()
    start = time.perf_counter()
    out = model.generate(prompt(), **spec, max_new_tokens=100, do_sample=False, max_time=0.0)
    assert out.shape[1] == 13  # plain generation emits one token, too, before it looks at the time
    assert out.shape == model.generate(prompt(), max_new_tokens=100, max_time=0.0).shape
    out = model.generate(**ragged(), **spec, max_new_tokens=100, do_sample=False, max_time=0.03)
    assert time.perf_counter() - start < 30
    full = model.generate(**ragged(), max_new_tokens=100, do_sample=False)[:, : out.shape[1]]
    assert ((out == full) | (out == PAD)).all()


# -- streamers -------------------------------------------------------------------------------


class Puts(BaseStreamer):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((value.tolist(), value.dtype, value.device.type))

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("eos", [None, [EOS, 5, 18, 50]])
@pytest.mark.parametrize("rows", [1, 3])
def test_streamer_gets_what_plain_generation_puts(
    tiny: Tiny, spec: Spec, rows: int, eos: list[int] | None
) -> None:
    plain, ours = Puts(), Puts()
    for streamer, strategy in ((plain, {}), (ours, spec)):
        tiny("llama_tied").generate(
            **(ragged() if rows == 3 else {"input_ids": prompt()}),
            **GREEDY, **strategy, streamer=streamer, eos_token_id=eos,
        )  # fmt: skip
    assert ours.calls == plain.calls


# -- outputs ---------------------------------------------------------------------------------


def emitted(tokens: torch.Tensor, eos: list[int] | None) -> list[int]:
    """How many tokens each row has emitted, its first EOS the last of them."""
    return [
        next((place for place, token in enumerate(row, 1) if token in (eos or ())), len(row))
        for row in tokens.tolist()
    ]


def check_recorded(ours: Any, plain: Any, ends: list[int]) -> None:
    """Scores and logits per emitted token; of a row past its end there are none."""
    for name in ("scores", "logits"):
        mine, theirs = getattr(ours, name), getattr(plain, name)
        assert len(mine) == len(theirs)
        for column, (a, b) in enumerate(zip(mine, theirs)):
            assert a.shape == b.shape and a.dtype == b.dtype == torch.float32
            for row, end in enumerate(ends):
                if column < end:
                    # Several tokens per forward add up in another order: a few ulps of 10.
                    torch.testing.assert_close(a[row], b[row], rtol=1e-4, atol=1e-4)
                else:
                    assert not a[row].any()


def test_scores_and_logits(tiny: Tiny, spec: Spec) -> None:
    model = tiny("llama_tied")
    settings = {
        **GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
        "repetition_penalty": 1.2, "suppress_tokens": [8, 9],
    }  # fmt: skip
    free = model.generate(**ragged(), **GREEDY, repetition_penalty=1.2, suppress_tokens=[8, 9])
    for eos in (None, [int(free[1, 15]), int(free[0, 20])]):
        for inputs in (ragged(), {"input_ids": prompt()}):
            plain = model.generate(**inputs, **settings, eos_token_id=eos)
            ours = model.generate(**inputs, **settings, **spec, eos_token_id=eos)
            assert isinstance(ours, hf_spec.SpecGenerateOutput)
            assert isinstance(ours, GenerateDecoderOnlyOutput)
            assert ours.sequences.tolist() == plain.sequences.tolist()
            check_recorded(ours, plain, emitted(ours.sequences[:, 12:], eos))
            assert ours.attentions is None and ours.hidden_states is None
            # A consumer of the scores that stock users call next.
            transitions = [
                model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
                for out in (ours, plain)
            ]
            live = transitions[1].isfinite() & (ours.sequences[:, 12:] != PAD)
            torch.testing.assert_close(*(one[live] for one in transitions), rtol=1e-4, atol=1e-4)


def test_statistics_of_a_model_inside_others(fresh: Tiny) -> None:
    """A PeftModel, a compiled model, a distributed one, a module of one's own, one in another."""
    model: Any = fresh("llama")

    class Wrapper(torch.nn.Module):
        def __init__(self, module: Any):
            super().__init__()
            self.module = module

    tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    around = [tuned, Wrapper(tuned), Wrapper(torch.compile(model)), Wrapper(Wrapper(model))]
    assert all(hf_spec.last_stats(one) is None for one in around)
    tuned.generate(input_ids=prompt(), **GREEDY, assistant_strategy="prompt_lookup")
    own = hf_spec.last_stats(model)
    assert own is not None and all(hf_spec.last_stats(one) is own for one in around)


@pytest.mark.parametrize("eos", [None, [5, 18, 50]])
def test_spec_stats(fresh: Tiny, spec: Spec, eos: list[int] | None) -> None:
    model = fresh("llama_tied")
    memory(model).update({(UNPADS, several): True for several in (False, True)})  # none tells
    assert hf_spec.last_stats(model) is None
    with pytest.raises(ValueError, match="give the model"):
        hf_spec.last_stats(None)  # type: ignore[arg-type]
    for inputs in (ragged(), {"input_ids": prompt()}):
        with forwards(model) as sizes:
            out = model.generate(
                **inputs, **GREEDY, **spec, eos_token_id=eos, return_dict_in_generate=True
            )
        stats = out.spec_stats
        assert hf_spec.last_stats(model) is stats
        assert out.scores is None and out.logits is None  # nobody has asked for them
        new = emitted(out.sequences[:, 12:], eos)
        assert stats.num_generated_tokens == sum(new)
        assert stats.num_steps + stats.num_draft_forwards == len(sizes)
        histogram = stats.accepted_histogram
        assert sum(histogram.values()) == stats.num_row_steps
        assert sum(k * n for k, n in histogram.items()) == sum(new)
        assert min(histogram) >= 1  # an unfinished row emits at least one token per step
        assert stats.mean_accepted_tokens == sum(new) / stats.num_row_steps >= 1
        assert stats.num_steps <= stats.num_row_steps <= stats.num_steps * len(new)
        assert stats.num_drafted_tokens >= sum(new) - stats.num_row_steps
        rates = stats.acceptance_per_position
        assert (len(rates) > 0) == (stats.num_drafted_tokens > 0)
        assert all(0 <= rate <= 1 for rate in rates)
        reached = [stats.accepted[depth] for depth in sorted(stats.accepted)]
        assert reached == sorted(reached, reverse=True)
        for part in ("draft", "forward", "verify", "other"):
            assert getattr(stats, f"{part}_seconds") > 0
