"""Prompts of a benchmark: limits and cuts; tests/test_data.py has their fields."""

from collections import Counter

import pytest
from tiny_checkpoint import make_model, make_tokenizer

from hf_spec.tools.bench.prompts import Prompt, encode, encode_prompts, encode_within, spread
from hf_spec.tools.data import Message


def test_limit_is_spread_evenly_and_keeps_the_order():
    sizes = {"small": 2, "large": 40, "middle": 10}
    prompts = [Prompt(f"{name}{i}", name, i) for name, n in sizes.items() for i in range(n)]
    for limit in (1, 3, 7, 12, 30, 52, 99, None):
        chosen = spread(prompts, limit)
        assert chosen == spread(prompts, limit)
        assert len(chosen) == min(limit or 99, len(prompts))
        assert chosen == [prompt for prompt in prompts if prompt in chosen]
        # No category has two prompts fewer than another one, unless it is used up.
        counts = Counter(prompt.category for prompt in chosen)
        for name, size in sizes.items():
            assert counts[name] == size or counts[name] >= max(counts.values()) - 1
    ids = [prompt.question_id for prompt in spread(prompts, 12) if prompt.category == "large"]
    assert ids == [0, 8, 16, 24, 32]  # not the first five


def test_chat_template_is_applied_when_there_is_one():
    tokenizer = make_tokenizer()
    assert tokenizer.decode(encode(tokenizer, "hi")) == "<|user|>hi<|end|><|assistant|>"
    history = [Message("system", "S"), Message("user", "a"), Message("assistant", "b")]
    tokenizer = make_tokenizer(chat=False)
    assert tokenizer.decode(encode(tokenizer, "c", history)) == "S\n\na\n\nb\n\nc"
    assert Prompt("c", history=tuple(history)).full_text == "S\n\na\n\nb\n\nc"


def test_long_prompt_is_cut_at_its_beginning_inside_the_template():
    tokenizer = make_tokenizer()
    text = "".join(chr(ord("a") + i % 26) for i in range(500))
    ids, cut = encode_within(tokenizer, Prompt(text), 100)
    decoded = tokenizer.decode(ids)
    assert cut and 90 <= len(ids) <= 100
    assert decoded.startswith("<|user|>") and decoded.endswith("<|end|><|assistant|>")
    assert text.endswith(decoded.removeprefix("<|user|>").removesuffix("<|end|><|assistant|>"))
    assert encode_within(tokenizer, Prompt("short"), 100) == (encode(tokenizer, "short"), False)
    assert encode_within(tokenizer, Prompt(text), None)[1] is False


def test_of_a_long_chat_the_oldest_turns_are_left_out_first():
    tokenizer = make_tokenizer()
    history = [Message("system", "S"), Message("user", "a" * 40), Message("assistant", "b" * 40)]
    history += [Message("user", "c" * 20), Message("assistant", "d" * 20)]
    prompt = Prompt("the end", history=tuple(history))

    def within(limit):
        ids, cut = encode_within(tokenizer, prompt, limit)
        assert len(ids) <= limit and cut == (limit < 256)
        return tokenizer.decode(ids).replace("<|end|>", "").removesuffix("<|assistant|>")

    end = "<|user|>the end"
    late = "<|user|>" + "c" * 20 + "<|assistant|>" + "d" * 20 + end
    system = tokenizer.decode(encode(tokenizer, "", history[:1])).partition("<|end|>")[0]
    assert within(256).endswith("b" * 40 + late)
    assert within(100) == system + late
    assert within(40) == system + end
    assert within(23).startswith(system) and within(23).endswith("end") and len(within(23)) < 29
    with pytest.raises(ValueError, match="template and the system message take .* leaves 5"):
        encode_within(tokenizer, prompt, 5)


def test_a_template_that_refuses_a_role_is_reported_with_the_prompt():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    prompts = [Prompt("c", question_id="q7", history=(Message("system", "S"),))]
    rule = "prompt 'q7': the tokenizer's chat template refuses .* system, user: System role not"
    with pytest.raises(ValueError, match=rule):
        encode_prompts(make_model(), tokenizer, prompts, 8)
