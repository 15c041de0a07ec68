"""Prompt lookup inside vLLM: the proposer by itself, and a real engine where there is one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_clock import FakeClock
from transformers import LlamaConfig, LlamaForCausalLM

from hf_spec.hub.requests import GONE, key
from hf_spec.hub.vllm import TRIED, LookupProposer, batch_key

LONGEST = 64
#: Repeats itself, so that lookups find what follows.
LOOP = [5, 9, 7, 11, 13, 8]


def config(depth: int = 4, longest: int = LONGEST, options: Any = None) -> Any:
    """Stands in for vLLM's config."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=depth),
        model_config=SimpleNamespace(max_model_len=longest),
        additional_config={} if options is None else {"hf_spec": options},
    )


class Engine:
    """Stands in for vLLM: rows of requests whose outputs are known.

    Args:
        seconds: of a step, by rows and drafted tokens.
    """

    def __init__(
        self, options: Any = None, seconds: Callable[[int, int], float] = lambda rows, drafted: 1.0,
        depth: int = 4, longest: int = LONGEST,
    ):  # fmt: skip
        self.clock = FakeClock()
        self.proposer = LookupProposer(config(depth, longest, options), self.clock)
        self.seconds = seconds
        self.tokens = np.zeros((8, longest), np.int32)
        self.lengths = np.zeros(8, np.int32)
        self.rows: list[list[int]] = []  # text of each row, of which `lengths` are known
        self.sampled: list[list[int]] = []
        self.drafts: list[list[int]] = []
        self.steps: list[tuple[int, int]] = []  # rows, and drafted tokens, of each

    def admit(self, text: list[int], prompt: int, row: int | None = None) -> None:
        """A request begins, in a row of its own or in that of one that has ended."""
        row = len(self.rows) if row is None else row
        if row == len(self.rows):
            self.rows.append(text)
            self.sampled.append([])
            self.drafts.append([])
        self.rows[row], self.sampled[row], self.drafts[row] = text, [], []
        self.tokens[row], self.lengths[row] = 0, prompt
        self.tokens[row, :prompt] = text[:prompt]

    def swap(self, one: int, other: int) -> None:
        for rows in (self.rows, self.sampled, self.drafts):
            rows[one], rows[other] = rows[other], rows[one]
        self.tokens[[one, other]] = self.tokens[[other, one]]
        self.lengths[[one, other]] = self.lengths[[other, one]]

    def step(self) -> list[list[int]]:
        """The model runs, and the proposer drafts for the next step."""
        drafted = sum(map(len, self.drafts))
        self.steps.append((len(self.rows), drafted))
        self.clock.now += self.seconds(len(self.rows), drafted)
        for row, (text, draft) in enumerate(zip(self.rows, self.drafts)):
            known = self.lengths[row]
            equal = (ours == theirs for ours, theirs in zip(draft, text[known:]))
            accepted = sum(takewhile(bool, equal))
            self.sampled[row] = new = text[known : known + accepted + 1]
            self.tokens[row, known : known + len(new)] = new
            self.lengths[row] += len(new)
        count = len(self.rows)
        self.drafts = self.proposer.propose(self.sampled, self.lengths[:count], self.tokens)
        assert len(self.drafts) == count
        return self.drafts


def test_what_followed_before_is_drafted() -> None:
    engine = Engine({"drafting": "always"})
    engine.admit(LOOP * 5, 8)
    assert engine.step() == [LOOP[3:] + LOOP[:1]]  # nine tokens are known
    assert engine.step() == [LOOP[2:]]  # all four came, and one more
    assert engine.proposer.stats.accepted_histogram == {5: 1}


def test_drafts_end_where_the_longest_text_does() -> None:
    engine = Engine({"drafting": "always"}, longest=12)
    engine.admit((LOOP * 3)[:12], 8)
    (draft,) = engine.step()
    assert draft == LOOP[3:5], "nine tokens, two draft tokens, and the step's own one"
    engine.lengths[0] = 11
    engine.tokens[0, :11] = (LOOP * 2)[:11]
    assert engine.proposer.propose([LOOP[3:5]], engine.lengths[:1], engine.tokens) == [[]]


def test_rows_within_a_prompt_are_left_alone() -> None:
    engine = Engine({"drafting": "always"})
    engine.admit(LOOP * 5, 8)
    engine.step()
    engine.admit(LOOP * 5, 20)
    tokens = [LOOP[3:4], []]
    engine.lengths[0] = 10
    engine.tokens[0, :10] = (LOOP * 2)[:10]
    drafts = engine.proposer.propose(tokens, engine.lengths[:2], engine.tokens)
    assert drafts[0] and drafts[1] == []
    assert engine.proposer.propose([[], []], engine.lengths[:2], engine.tokens) == [[], []]
    assert engine.proposer.propose([], engine.lengths[:0], engine.tokens) == []


def followed(engine: Engine) -> list[Any]:
    """The request known for each row."""
    known = engine.proposer._requests._known
    texts = (engine.tokens[row, : engine.lengths[row]] for row in range(len(engine.rows)))
    return [known[key(text)][-1] for text in texts]


def test_requests_are_known_where_rows_change() -> None:
    """Swapped, ended, replaced, and away for some steps."""
    rng = random.Random(0)
    texts = [[rng.randrange(1, 50) for _ in range(60)] for _ in range(4)]
    engine = Engine()
    for text in texts[:3]:
        engine.admit(text, 6)
    engine.step()
    first, second, third = followed(engine)
    engine.swap(0, 2)
    engine.step()
    assert followed(engine) == [third, second, first]
    engine.admit(texts[3], 9, row=1)  # the second has ended
    engine.step()
    new = followed(engine)[1]
    assert followed(engine) == [third, new, first] and new is not second
    # The first waits, and comes back into another row.
    length = int(engine.lengths[2])
    del engine.rows[2], engine.sampled[2], engine.drafts[2]
    engine.step()
    engine.admit(texts[0], length)
    engine.swap(0, 2)
    engine.step()
    assert followed(engine) == [first, new, third]
    for row, text in enumerate((texts[0], texts[3], texts[2])):
        assert followed(engine)[row].tokens.tolist() == text[: engine.lengths[row]]


def test_what_has_ended_is_forgotten() -> None:
    engine = Engine()
    for turn in range(4):
        engine.admit([turn + 1, *range(10, 60)], 5, row=0)
        for _ in range(GONE + 1):
            engine.step()
    assert sum(map(len, engine.proposer._requests._known.values())) <= 2


@pytest.mark.parametrize("shared", [0, 4096])
def test_texts_of_others(shared: int) -> None:
    rng = random.Random(1)
    text = [rng.randrange(1, 50) for _ in range(40)]
    engine = Engine({"drafting": "always", "shared_tokens": shared, "min_ngram": 3})
    engine.admit(text, 10)
    for _ in range(25):
        engine.step()
    engine.admit([51, 52, 53, *range(60, 110)], 4, row=0)
    for _ in range(GONE + 2):  # until the first is known to have ended
        engine.step()
    engine.admit([55, 56, *text], 12, row=0)
    (draft,) = engine.step()
    assert draft == (text[11:15] if shared else [])
    if shared:
        assert engine.step()[0] == text[16:20]


def wandering(seed: int, length: int = 400, copied: float = 0.7) -> list[int]:
    """A text that copies itself now and then."""
    rng = random.Random(seed)
    text = [rng.randrange(1, 200) for _ in range(20)]
    while len(text) < length:
        if rng.random() < copied:
            start = rng.randrange(len(text) - 10)
            text += text[start : start + rng.randrange(4, 10)]
        else:
            text += [rng.randrange(1, 200) for _ in range(4)]
    return text[:length]


def spent(
    seconds: Callable[[int, int], float], rows: int, options: Any = None
) -> tuple[float, ...]:
    """Seconds with the proposer and of plain steps, and drafted tokens per step later on."""
    engine = Engine(options, seconds, depth=8, longest=500)
    for row in range(rows):
        engine.admit(wandering(row), 30)
    engine.step()
    began, before = engine.clock.now, engine.lengths[:rows].sum()
    while all(engine.lengths[row] < 380 for row in range(rows)):
        engine.step()
    emitted = float(engine.lengths[:rows].sum() - before)
    drafted = sum(drafted for _, drafted in engine.steps[30:]) / len(engine.steps[30:])
    return engine.clock.now - began, emitted / rows * seconds(rows, 0), drafted


@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_where_they_save_time(rows: int) -> None:
    ours, plain, _ = spent(lambda rows, drafted: 1.0 + 0.02 * drafted, rows)
    assert ours < 0.75 * plain


@pytest.mark.parametrize("rows", [1, 8])
def test_no_drafts_where_they_save_none(rows: int) -> None:
    """Each draft token costs more time than it can save."""

    def seconds(rows: int, drafted: int) -> float:
        return 1.0 + 1.2 / rows * drafted

    ours, plain, drafted = spent(seconds, rows)
    tries = 2 * (8 + 4)  # draft tokens of the first steps, which tell what one costs
    assert ours < 1.03 * plain + tries * 1.2 / rows
    assert drafted < 0.25, "8 and 4 draft tokens in two of some 66 steps: rows may become cheaper"
    everything = spent(seconds, rows, {"drafting": "always"})
    assert everything[0] > 1.2 * everything[1] and everything[2] > 1


def test_prompts_and_pauses_are_no_steps() -> None:
    engine = Engine(seconds=lambda rows, drafted: 1.0 + 0.02 * drafted)
    engine.admit(wandering(0, 60), 10)
    for _ in range(12):
        engine.step()
    setting = engine.proposer._step.policy.setting
    plain = setting.times.plain_seconds()
    engine.clock.now += 1000  # nobody asks
    engine.admit(wandering(1, 60), 10, row=0)
    engine.step()
    assert setting.times.plain_seconds() == plain


def test_rows_are_counted_alike_where_they_are_many() -> None:
    keys = [batch_key(rows) for rows in range(1, 600)]
    assert keys[:16] == list(range(1, 17)) and keys == sorted(keys)
    assert all(0.87 < key / rows <= 1 for rows, key in enumerate(keys, 1))
    assert len(set(keys)) < 70


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ngrams": 3}, "must be an object with options among max_ngram, min_ngram"),
        ({"min_ngram": 3, "max_ngram": 2}, "min_ngram=3: must be a whole number from 1 to 2"),
        ({"shared_tokens": -1}, "shared_tokens=-1: must be a whole number from 0"),
        ({"drafting": False}, "drafting=False: choose one of auto, always"),
        ([1], "must be an object with options among"),
    ],
)
def test_options_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        LookupProposer(config(options=options))
    assert message in str(raised.value)


def test_another_interface_is_named() -> None:
    with pytest.raises(RuntimeError, match=f"another interface.*tried with {TRIED[0]}"):
        LookupProposer(SimpleNamespace(speculative_config=None))


#: One engine without the proposer and one with it; prompts are answered together and one alone.
REAL = """
import json, sys
import vllm

def answers(model, speculative):
    engine = vllm.LLM(
        model=model, dtype="float32", max_num_seqs=3, max_model_len=112, enforce_eager=True,
        enable_prefix_caching=False, speculative_config=speculative, skip_tokenizer_init=True,
        disable_log_stats=False, additional_config={"hf_spec": {"drafting": "always"}},
    )
    ids = [[5, 9, 7, 11] * n + [13] for n in (2, 3, 4, 5)]
    prompts = [{"prompt_token_ids": row} for row in ids]
    greedy = [
        vllm.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in (30, 40, 50, 70)
    ]
    together = engine.generate(prompts, greedy, use_tqdm=False)
    alone = engine.generate(prompts[0], greedy[0], use_tqdm=False)
    counts = {one.name: one.value for one in engine.get_metrics() if hasattr(one, "value")}
    engine.llm_engine.engine_core.shutdown()
    found = [list(one.outputs[0].token_ids) for one in [*together, *alone]]
    return found, counts.get("vllm:spec_decode_num_accepted_tokens", 0)

if __name__ == "__main__":
    proposer = {"model": "hf_spec.hub.vllm.LookupProposer", "num_speculative_tokens": 4}
    print(json.dumps([answers(sys.argv[1], one) for one in (None, proposer)]))
"""


def interpreter_with_vllm() -> str:
    named = os.environ.get("HF_SPEC_VLLM_PYTHON")
    if named:
        return named
    try:
        distribution("vllm")
    except PackageNotFoundError:
        pytest.skip("no vllm here, and HF_SPEC_VLLM_PYTHON names no interpreter that has it")
    return sys.executable


@pytest.mark.environment
def test_a_real_engine_answers_alike(tmp_path: Path) -> None:
    """Takes minutes: engines start twice."""
    python = interpreter_with_vllm()
    torch.manual_seed(0)
    shape = {  # the smallest heads that vLLM has attention for
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
    }  # fmt: skip
    tiny = LlamaConfig(
        vocab_size=64, initializer_range=0.2, bos_token_id=1, eos_token_id=2, **shape
    )
    LlamaForCausalLM(tiny).save_pretrained(tmp_path / "model")
    (tmp_path / "run.py").write_text(REAL)
    environment = {
        **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    ran = subprocess.run(
        [python, "run.py", str(tmp_path / "model")], cwd=tmp_path, capture_output=True, text=True,
        timeout=1800, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout[-6000:]}\n{ran.stderr[-2000:]}"
    (plain, none), (ours, accepted) = json.loads(ran.stdout.strip().splitlines()[-1])
    assert ours == plain and none == 0
    assert accepted > 0, "nothing that was drafted came"


def test_steps_without_a_call_are_made_up_for() -> None:
    """Near the longest text vLLM goes on by itself."""
    engine = Engine({"drafting": "always"})
    engine.admit(LOOP * 8, 8)
    engine.step()
    engine.lengths[0] += 3
    engine.tokens[0] = (LOOP * 11)[:LONGEST]
    engine.drafts = [[]]
    assert engine.step()[0][0] == (LOOP * 3)[engine.lengths[0]]
    assert engine.proposer.stats.num_row_steps == 0, "such a step tells nothing"
