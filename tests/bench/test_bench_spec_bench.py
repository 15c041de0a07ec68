"""Answer files as Spec-Bench's own ``evaluation/speed.py`` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
from tiny_checkpoint import make_model, make_tokenizer

from hf_spec.bench.prompts import Prompt
from hf_spec.bench.runner import run
from hf_spec.bench.spec_bench import answer_path, write_answers

STOCK = "transformers:prompt_lookup"


def test_answer_files(tmp_path):
    model, tokenizer = make_model(), make_tokenizer()
    prompts = [Prompt("abab" * 5, "writing", 81), Prompt("xyz" * 6, "qa", 401)]
    result = run(
        model, tokenizer, prompts, ["prompt_lookup", STOCK],
        max_new_tokens=20, batch_sizes=[1, 2],
    )  # fmt: skip
    paths = write_answers(tmp_path / "answers.jsonl", result, tokenizer, "tiny")
    assert [path.name for path in paths] == [
        "answers-plain.jsonl",
        "answers-prompt_lookup.jsonl",
        "answers-transformers_prompt_lookup.jsonl",
    ]
    for path, name in zip(paths, ("plain", "prompt_lookup", STOCK)):
        answers = [json.loads(line) for line in path.read_text().splitlines()]
        assert [answer["question_id"] for answer in answers] == [81, 401]
        own = [m for m in result.measurements if m.strategy == name and m.batch_size == 1]
        for answer, prompt, item in zip(answers, prompts, own):
            assert set(answer) == {
                "question_id", "category", "answer_id", "model_id", "choices", "tstamp",
            }  # fmt: skip
            assert answer["category"] == prompt.category
            assert answer["model_id"] == f"tiny-{name}"
            (choice,) = answer["choices"]
            assert choice["index"] == 0
            assert choice["turns"] == [tokenizer.decode(item.rows[0], skip_special_tokens=True)]
            assert choice["new_tokens"] == [len(item.rows[0])]
            assert choice["wall_time"] == [item.seconds]
            (steps,) = choice["decoding_steps"]
            assert len(choice["accept_lengths"]) == steps
            assert sum(choice["accept_lengths"]) == len(item.rows[0])
        # Spec-Bench's "mean accepted tokens" over all questions is our tau.
        lengths = [n for answer in answers for n in answer["choices"][0]["accept_lengths"]]
        assert mean(lengths) == pytest.approx(result.overall(name)["tau"])


def test_paths_are_safe():
    path = Path("out/answers")
    assert answer_path(path, "transformers:assisted=a/b") == Path(
        "out/answers-transformers_assisted_a_b.jsonl"
    )
    assert answer_path(Path("a.json"), "plain") == Path("a-plain.json")
