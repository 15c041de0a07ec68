"""Answer files as Spec-Bench's own ``evaluation/speed.py`` reads them."""

import json
from pathlib import Path
from statistics import mean

import pytest
from scripts import load_script
from tiny_checkpoint import make_tokenizer, save_checkpoint, write_prompts


def test_answer_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("spec_bench")
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["abab" * 5, "and then"]},
        {"question_id": 401, "category": "qa", "turns": ["xyz" * 6]},
    ]
    prompts = write_prompts(tmp_path / "question.jsonl", rows)
    measured, run = [], script.run
    monkeypatch.setattr(script, "run", lambda *a, **b: measured.append(run(*a, **b)) or measured[0])
    script.main(
        [
            "--model", str(save_checkpoint(tmp_path / "m")), "--prompts", str(prompts),
            "--output", str(tmp_path / "answers.jsonl"), "--dtype", "float32",
            "--strategies", "prompt_lookup,transformers:prompt_lookup", "--max-new-tokens", "20",
        ]
    )  # fmt: skip
    (result,), tokenizer = measured, make_tokenizer()
    for name in ("generate", "prompt_lookup", "transformers:prompt_lookup"):
        path = tmp_path / f"answers-{name.replace(':', '_')}.jsonl"
        answers = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(one["question_id"], one["category"]) for one in answers] == [
            (81, "writing"), (401, "qa"),
        ]  # fmt: skip
        lengths = []
        for answer, item in zip(answers, (m for m in result.measurements if m.strategy == name)):
            (choice,) = answer["choices"]
            assert choice["turns"] == [tokenizer.decode(item.rows[0], skip_special_tokens=True)]
            assert choice["new_tokens"] == [len(item.rows[0])] == [sum(choice["accept_lengths"])]
            assert choice["wall_time"] == [item.seconds]
            assert choice["decoding_steps"] == [len(choice["accept_lengths"])]
            lengths += choice["accept_lengths"]
        # Spec-Bench's "mean accepted tokens" over all questions is our tau.
        assert mean(lengths) == pytest.approx(result.overall(name)["tau"])
