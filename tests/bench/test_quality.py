"""Quality of answers, on a tiny model: each score worked out a second time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from sacrebleu.metrics import CHRF
from tiny_checkpoint import make_model, make_tokenizer, save_checkpoint, write_prompts

import hf_spec
from hf_spec import cli
from hf_spec.bench.contenders import PLAIN, Adapter, contenders
from hf_spec.bench.prompts import Prompt, encode
from hf_spec.bench.quality import _last_numbers, measured, quality

NEW = 12
PROMPTS = [
    Prompt("abc abc", reference="abd"),
    Prompt("one two one", reference="7 of 1,200"),
    Prompt("xyz", reference="nothing"),
]


def random_space_adapter(model) -> None:
    torch.manual_seed(0)
    model.add_adapter(hf_spec.SpaceConfig(num_mask_tokens=2, update="lora"), "tuned")
    with torch.no_grad():
        for parameter in model.spec_modules.parameters():
            parameter.normal_(std=0.2)


def worked_out_again(model, tokenizer) -> tuple[float, list[str]]:
    total, count, answers = 0.0, 0, []
    for prompt in PROMPTS:
        ids = encode(tokenizer, prompt.text)
        answer = tokenizer(prompt.reference, add_special_tokens=False)["input_ids"]
        answer.append(tokenizer.eos_token_id)
        with torch.no_grad():
            log_p = model(torch.tensor([ids + answer])).logits[0].double().log_softmax(-1)
        total -= sum(float(log_p[len(ids) - 1 + i, token]) for i, token in enumerate(answer))
        count += len(answer)
        out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
        answers.append(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
    return math.exp(total / count), answers


def test_every_score_worked_out_again() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    random_space_adapter(model)
    model.disable_adapters()
    lineup = measured(
        contenders(["space"], None, [Adapter("at/tuned", "tuned", "space", {}, True)])
    )
    assert [one.name for one in lineup] == ["plain", "plain@tuned"]  # space itself is exact
    base, tuned = quality(model, tokenizer, PROMPTS, lineup, NEW, batch_size=2)
    model.disable_adapters()
    expected = {"plain": worked_out_again(model, tokenizer)}
    model.enable_adapters()
    expected["plain@tuned"] = worked_out_again(model, tokenizer)
    references = [[prompt.reference for prompt in PROMPTS]]
    for score in (base, tuned):
        perplexity, answers = expected[score.strategy]
        # float32 against float64, and updates merged or beside the weights
        assert score.perplexity == pytest.approx(perplexity, rel=1e-3)
        assert score.chrf == pytest.approx(CHRF().corpus_score(answers, references).score)
        same = sum(a == b for a, b in zip(answers, expected["plain"][1]))
        assert score.identical == same / 3 and score.prompts == 3
    assert base.identical == 1.0 and tuned.identical < 1.0
    assert base.perplexity != pytest.approx(tuned.perplexity, rel=1e-3)


def test_the_last_number_decides() -> None:
    references = ["2 + 3 = <<5>>5\n#### 5", "#### 1,200", "no number", "#### -4"]
    answers = ["5 apples and 6", "it is 1200.0", "3", "-4."]
    assert _last_numbers(answers, references) == pytest.approx(2 / 3)
    assert _last_numbers(["1"], ["none"]) is None


def test_lossy_strategies_are_measured_and_exact_ones_are_not() -> None:
    options = {"prompt_lookup:typical": {"acceptance": "typical"}}
    lineup = contenders(["prompt_lookup", "prompt_lookup:typical"], options)
    assert [one.name for one in measured(lineup)] == [PLAIN.name, "prompt_lookup:typical"]


def test_a_prompt_without_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="no reference answer.*in answer, completion, output"):
        quality(make_model(), make_tokenizer(), [Prompt("x", question_id=4)], [PLAIN])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    checkpoint = save_checkpoint(tmp_path / "model")
    rows = [{"question": "abc", "answer": "1"}, {"prompt": "xyz", "completion": "2"}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    arguments = [
        "quality", "--model", str(checkpoint), "--prompts", str(prompts), "--max-new-tokens", "8",
        "--output", str(tmp_path / "out"), "--dtype", "float32", "--strategies",
        "prompt_lookup,prompt_lookup:typical",
        "--strategy-kwargs", 'prompt_lookup:typical={"acceptance": "typical"}',
    ]  # fmt: skip
    assert cli.main(arguments) == 0
    assert "answers are plain decoding's: prompt_lookup\n" in capsys.readouterr().out
    data = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert [row["strategy"] for row in data["quality"]] == ["plain", "prompt_lookup:typical"]
    assert data["quality"][0]["identical"] == 1.0 and data["environment"]["dtype"] == "float32"
