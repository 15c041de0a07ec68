"""``hf-spec distill`` without prompts: the model writes them, as a user would."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_checkpoint import EOS, PAD, make_tokenizer, save_checkpoint

from hf_spec.tools import cli
from hf_spec.tools.training import distill
from hf_spec.tools.training.dataset import read_answers, read_provenance
from hf_spec.tools.training.distill import OWN_PROMPTS, write_own_prompts

pytest.importorskip("datasets")
pytest.importorskip("accelerate")

WRITTEN = ["How? ", "Why", "How?", "endless", f"odd {PAD}", " ", "Who: [a]"]
AS_TEXT = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"


def writing(tokenizer: Any, texts: list[str], end: str) -> Any:
    """A model that writes given texts, and keeps what it is given."""
    rows = [tokenizer(text if text == "endless" else text + end)["input_ids"] for text in texts]
    space, most = tokenizer(" ")["input_ids"], max(map(len, rows))
    written = torch.tensor([row + space * (most - len(row)) for row in rows])

    def generate(given: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        assert kwargs["assistant_strategy"] is None and kwargs["do_sample"]
        return torch.cat([given[: len(written)], written[: len(given)]], 1)

    return Mock(device=torch.device("cpu"), generate=Mock(side_effect=generate))


def prompts_of(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("end", [EOS, "[/INST]", ""])
def test_words_end_where_the_template_says(tmp_path, end):
    tokenizer = make_tokenizer(chat=bool(end))
    if end == "[/INST]":
        tokenizer.chat_template = AS_TEXT
    model = writing(tokenizer, WRITTEN, f" {end} more" if end else "")
    path = tmp_path / "prompts.jsonl"
    want = ["How?", "Why", "Who: [a]"] if end else ["How?", "Why", "endless", "Who: [a]"]
    write_own_prompts(model, tokenizer, path, len(want), 2, seed=0)
    model.generate.assert_called_once()
    (rows,), kwargs = model.generate.call_args
    start = {EOS: "<|user|>", "[/INST]": "[INST] ", "": EOS}[end]
    assert tokenizer.decode(rows[0]) == start and len(rows) == 8
    assert kwargs.get("eos_token_id") == ([1] if end == EOS else None)
    assert prompts_of(path) == want


def test_repetition_and_templates_without_a_place(tmp_path):
    tokenizer, path = make_tokenizer(), tmp_path / "prompts.jsonl"
    model = writing(tokenizer, ["How?"] * 4, EOS)
    with pytest.raises(ValueError, match="wrote 1 different prompts in 16 samples; 2 were to be"):
        write_own_prompts(model, tokenizer, path, 2, 4, seed=0)
    for template in ("{{ raise_exception('no system message') }}", "{{ bos_token }}"):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="no place for a user's words alone .*--prompts"):
            write_own_prompts(model, tokenizer, path, 2, 4, seed=0)
    tokenizer = make_tokenizer(chat=False)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a chat template nor a token that begins texts"):
        write_own_prompts(model, tokenizer, path, 2, 4, seed=0)
    assert not path.exists()


def test_by_command(tmp_path, capsys, monkeypatch):
    save_checkpoint(tmp_path / "m")
    output = tmp_path / "out"
    command = [
        "distill", "--model", str(tmp_path / "m"), "--dtype", "float32", "--device", "cpu",
        "--max-new-tokens", "6", "--batch-size", "4", "--output", str(output), "--limit", "6",
    ]  # fmt: skip
    assert cli.main(command) == 0
    prompts, rows = prompts_of(output / OWN_PROMPTS), list(read_answers(output))
    assert [row["prompt"] for row in rows] == prompts and len(set(prompts)) == 6
    assert {row["source"] for row in rows} == {OWN_PROMPTS}
    made = read_provenance(output)
    assert (made["prompts"], made["limit"]) == ({}, 6)

    # An interrupted run goes on with the prompts that it has.
    lines = (output / "answers.jsonl").read_text().splitlines(keepends=True)
    (output / "answers.jsonl").write_text("".join(lines[:4]))
    del made["rows"]
    (output / "provenance.json").write_text(json.dumps(made))
    monkeypatch.setattr(distill, "LONGEST", 0)
    assert cli.main(command) == 0 and list(read_answers(output)) == rows

    # Other settings, and what is written once and for all.
    assert cli.main([*command, "--limit", "5"]) == 2
    assert "limit" in capsys.readouterr().err
    assert prompts_of(output / OWN_PROMPTS) == prompts
