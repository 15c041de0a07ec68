"""``hf-spec lookups``: a file of answers that lookups search."""

import json
import sqlite3
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import load_checkpoint, make_tokenizer, save_checkpoint, write_prompts

import hf_spec
from hf_spec.tools import cli

pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep datasets out of the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("m"))


def answers(path: Path) -> list[list[int]]:
    with closing(sqlite3.connect(path)) as rows:
        return [list(array("i", one)) for (one,) in rows.execute("select tokens from answers")]


def lookups(checkpoint: Path, output: Path, *data: Path, more: Any = ()) -> int:
    given = [word for one in data for word in ("--data", str(one))]
    return cli.main(["lookups", "--model", str(checkpoint), *given, "-o", str(output), *more])


def test_answers_of_data_enter_a_file(checkpoint, tmp_path, capsys):
    """All turns of chats, and token ids; further ones are added. Calls draft from them, and add
    theirs."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    texts = write_prompts(tmp_path / "x.jsonl", [{"messages": [*chat, *chat[:1], chat[1]]}])
    model, tokenizer = load_checkpoint(checkpoint), make_tokenizer()
    (ids,) = tokenizer(["some words"], return_tensors="pt")["input_ids"][None]
    plain = model.generate(ids, max_new_tokens=30, do_sample=False)
    answer = plain[0, ids.shape[1] :].tolist()
    tokens = write_prompts(tmp_path / "y.jsonl", [{"prompt_ids": [4], "answer_ids": answer}])
    path, spoken = tmp_path / "new" / "lookups", [*tokenizer("bc")["input_ids"], 1]
    assert lookups(checkpoint, path, texts) == 0
    assert answers(path) == [spoken]
    told = capsys.readouterr().out
    assert f"1 added of 2, the others are repeated; the file has 3 tokens\nfile: {path}" in told
    assert lookups(checkpoint, path, texts, tokens) == 0
    assert "1 added of 3, the others are repeated" in capsys.readouterr().out
    assert answers(path) == [spoken, answer]
    steps = []
    for options in ({}, {"lookup_history": path}, {}):
        out = model.generate(
            ids, max_new_tokens=30, do_sample=False, assistant_strategy="prompt_lookup",
            assistant_kwargs={"drafting": "always", **options},
        )  # fmt: skip
        assert out.tolist() == plain.tolist()
        steps.append(hf_spec.last_stats(model).num_steps)
    assert steps[1] < steps[0] == steps[2]
    other = tokenizer("other words", return_tensors="pt")["input_ids"]
    model.generate(
        other, max_new_tokens=9, do_sample=False, assistant_strategy="prompt_lookup",
        assistant_kwargs={"lookup_history": path},
    )  # fmt: skip
    assert len(answers(path)) == 3


@pytest.mark.parametrize("later", [False, True])
def test_a_fixed_file(checkpoint, tmp_path, later):
    """No call adds to it; the command does. It may be one that calls could add to before."""
    data = write_prompts(tmp_path / "x.jsonl", [{"prompt": "a", "answer": "b"}])
    for _ in range(later):
        assert lookups(checkpoint, tmp_path / "f", data) == 0
    assert lookups(checkpoint, tmp_path / "f", data, more=["--fixed"]) == 0
    model = load_checkpoint(checkpoint)
    ids = make_tokenizer()("words", return_tensors="pt")["input_ids"]
    kwargs = {"lookup_history": str(tmp_path / "f")}
    model.generate(
        ids, max_new_tokens=9, assistant_strategy="prompt_lookup", assistant_kwargs=kwargs
    )
    assert len(answers(tmp_path / "f")) == 1
    write_prompts(data, [{"prompt": "a", "answer": "c"}])
    assert lookups(checkpoint, tmp_path / "f", data) == 0
    assert len(answers(tmp_path / "f")) == 2


def test_what_cannot_be_written(checkpoint, tmp_path, capsys):
    data = write_prompts(tmp_path / "x.jsonl", [{"prompt": "a", "answer": "b"}])
    assert lookups(checkpoint, tmp_path / "f", data) == 0
    config = json.loads((checkpoint / "config.json").read_text())
    save_checkpoint(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    for model, output, message in (
        (
            tmp_path / "other",
            tmp_path / "f",
            "tokens of another tokenizer (vocab_size 260, not 300",
        ),
        (checkpoint, data, "must be a new file, or one of earlier answers for lookups"),
        (tmp_path / "none", tmp_path / "g", "there is no such folder"),
    ):
        assert lookups(model, output, data) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert answers(tmp_path / "f") and not (tmp_path / "g").exists()
