"""SPACE's comparison of models, on a tiny one: each score worked out a second time."""

import math

import pytest
import torch
from scripts import load_script
from tiny_checkpoint import make_model, make_tokenizer

import hf_spec
from hf_spec.tools.bench.contenders import BASELINE, Adapter, contenders
from hf_spec.tools.bench.prompts import Prompt, encode

NEW = 8
PROMPTS = [Prompt("abc abc", reference="abd"), Prompt("one two", reference="7 of 1,200")]


def test_scores() -> None:
    script = load_script("space_quality")
    model, tokenizer = make_model(), make_tokenizer()
    torch.manual_seed(0)
    model.add_adapter(hf_spec.SpaceConfig(num_mask_tokens=2, update="lora"), "tuned")
    with torch.no_grad():
        for parameter in model.spec_modules.parameters():
            parameter.normal_(std=0.2)
    adapter = Adapter("at/tuned", "tuned", "space", {}, True)
    tuned = next(one for one in contenders(["space"], None, [adapter]) if one.name == one.baseline)
    found = script.scores(model, tokenizer, PROMPTS, [BASELINE, tuned], NEW, batch_size=2)
    assert [one.name for one in found] == ["generate", "generate@tuned"]
    assert found[0].identical == 1.0 and found[1].perplexity != found[0].perplexity
    model.disable_adapters()
    total, count = 0.0, 0
    for prompt in PROMPTS:
        ids = encode(tokenizer, prompt.text)
        answer = tokenizer(prompt.reference, add_special_tokens=False)["input_ids"] + [1]
        with torch.no_grad():
            log_p = model(torch.tensor([ids + answer])).logits[0].double().log_softmax(-1)
        total -= sum(float(log_p[len(ids) - 1 + i, token]) for i, token in enumerate(answer))
        count += len(answer)
    # float32 against float64, and updates merged or beside the weights
    assert found[0].perplexity == pytest.approx(math.exp(total / count), rel=1e-3)


def test_last_numbers_and_references() -> None:
    script = load_script("space_quality")
    assert script._last_number("3 and 1,200.5 in all") == 1200.5
    assert script._last_number("none") is None
    with pytest.raises(ValueError, match="no reference answer in 4: each prompt needs one"):
        script.scores(None, None, [Prompt("x", question_id=4)], [BASELINE])
