"""Option ``lookup_history`` with a path: answers that last, and answers of a corpus."""

import logging
import os
import random
import sqlite3
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_oracle import lent
from conftest import check_same, prompt, ragged
from forks import Program
from peft import get_peft_model
from running import drafting
from transformers import AutoModelForCausalLM

import hf_spec
from hf_spec.draft import lookup_file
from hf_spec.draft.lookup import END, History, Limits, Match
from hf_spec.draft.lookup_file import (
    AnswerFile,
    Corpus,
    LastingHistory,
    history_of,
    tokenizer_facts,
)
from hf_spec.draft.options import DraftOptions
from hf_spec.methods.registry import methods
from hf_spec.threads import forget

LONG = {"max_new_tokens": 40, "do_sample": False}
FACTS = {"model_type": "llama", "vocab_size": 61, "bos_token_id": 1}


class Config:
    """Of the model that `FACTS` are of."""

    def get_text_config(self, decoder: bool) -> Any:
        return type("Text", (), FACTS)


def found(matches: list[Match]) -> list[tuple[int, list[int]]]:
    """The size of each match, and what follows it, up to the end of its answer."""
    return [
        (one.size, list(one.source[one.end : list(one.source).index(END, one.end)]))
        for one in matches
        if one.source is not None
    ]


def texts(path: Path) -> list[list[int]]:
    with closing(sqlite3.connect(path)) as rows:
        return [list(array("i", one)) for (one,) in rows.execute("select tokens from answers")]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("limits", [{}, {"max_matches": 2}, {"min_ngram": 2, "max_ngram": 3}])
def test_an_index_of_many_tokens_finds_what_one_of_few_does(parts: int, limits: Any) -> None:
    rng = random.Random(parts)
    answers = [[rng.randrange(5) for _ in range(rng.randrange(1, 12))] for _ in range(60)]
    answers += [[3, 2**31 - 1, 3], [0]]
    expected, corpus = History(10**6), Corpus()
    expected.add(answers)
    for part in range(parts):
        given = [token for one in answers[part::parts] for token in (*one, END)]
        corpus = corpus.with_more(array("i", given))
    if parts > 1:  # in the order in which they came
        expected = History(10**6)
        expected.add(one for part in range(parts) for one in answers[part::parts])
    rule = Limits(**limits)
    for length in range(5):
        for _ in range(40):
            tokens = [rng.choice([0, 1, 2, 3, 4, 9, 2**31 - 1, -100]) for _ in range(length)]
            sizes = range(min(rule.max_ngram, 4), rule.min_ngram - 1, -1)
            matches = corpus.matches(tokens, rule.max_matches, sizes)
            assert found(matches) == found(expected.matches(tokens, rule))


def test_answers_of_calls_enter_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there are some. All are found, here and by a later process."""
    monkeypatch.setattr(lookup_file, "FEW", 20)
    history, all_of_them = LastingHistory(tmp_path / "x", Config()), History(10**6)
    for number in range(12):
        answers = [[number, 1, 2, 30 + number], [number + 1] * 3]
        history.add(answers)
        all_of_them.add(answers)
    later = LastingHistory(tmp_path / "x", Config())
    assert len(history._parts[0]) <= 20 < len(history._corpus.tokens)
    for tokens in ([5, 1, 2], [7, 7], [2], [40], []):
        expected = sorted(found(all_of_them.matches(tokens, Limits(max_matches=500))))
        for one in (history, later):
            assert sorted(found(one.matches(tokens, Limits(max_matches=500)))) == expected


@pytest.mark.parametrize("name", ["prompt_lookup", "layer_skip", "medusa"])
def test_a_later_process_repeats_an_answer_in_fewer_steps(
    name: str, fresh: Any, tmp_path: Path
) -> None:
    """And the output stays that of plain generation."""
    method, model, steps = methods()[name], fresh("llama"), []
    options: dict[str, Any] = {"lookup_history": tmp_path / "answers"}
    if name != "prompt_lookup":
        options |= {"lookup": True}
    if name == "layer_skip":
        options |= {"skip_attention": [0], "skip_mlp": [], "num_draft_tokens": 3}
    with lent(model, method.adapter_config(), random=False) if name == "medusa" else nullcontext():
        for _ in range(2):
            check_same(model, drafting(name, **options), **ragged(), **LONG)
            steps.append(hf_spec.last_stats(model).num_steps)
            forget(model)  # as another process has
    assert steps[1] < 0.7 * steps[0]


WRITES = f"""
    import sys
    from hf_spec.draft.lookup_file import AnswerFile
    file, first = AnswerFile(sys.argv[1], {FACTS!r}), int(sys.argv[2])
    for number in range(first, first + 40):
        file.add([[number, 5, 6]])
"""


def test_processes_share_a_file(tmp_path: Path) -> None:
    """Each sees the others' answers with its own."""
    programs = [Program(WRITES, str(tmp_path / "x"), str(first)) for first in (100, 200)]
    file, own = AnswerFile(tmp_path / "x", FACTS), 300
    seen: list[int] = []
    for number in range(own, own + 40):
        seen += file.add([[number, 5, 6]]).tolist()
    for program in programs:
        assert program.finish().returncode == 0
    seen += file.unseen().tolist()
    firsts = sorted(token for token in seen if token >= 100)
    assert firsts == [first + number for first in (100, 200, 300) for number in range(40)]
    assert sorted(one[0] for one in texts(tmp_path / "x")) == firsts


def test_threads_share_a_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_file, "FEW", 30)
    history, wrong = LastingHistory(tmp_path / "x", Config()), list[Any]()

    def work(first: int) -> None:
        for number in range(first, first + 25):
            history.add([[number, 1, 2, number]])
            wrong.extend(one for one in found(history.matches([1, 2], Limits())) if one[1][0] < 100)

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(work, first) for first in (100, 200, 300)]:
            one.result()
    assert not wrong
    for number in (100, 224, 310):
        assert found(history.matches([number, 1, 2], Limits()))[0] == (3, [number])
    assert len(texts(tmp_path / "x")) == 75


def test_the_oldest_answers_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the file, and of a process that has gone on for long. A repeated answer is the latest."""
    monkeypatch.setattr(lookup_file, "MOST_TOKENS", 100)
    monkeypatch.setattr(lookup_file, "FEW", 10)
    history = LastingHistory(tmp_path / "x", Config())
    for number in range(200):
        history.add([[number % 150, 7, 8, 9, 9]])
        kept = texts(tmp_path / "x")
        assert len(kept) * 5 <= 100 and kept[-1][0] == number % 150
    assert len(kept) > 12 and len(history._corpus.tokens) <= 220
    history.add([kept[0], kept[0]])
    assert texts(tmp_path / "x")[-1] == kept[0] and texts(tmp_path / "x").count(kept[0]) == 1
    history.add([[1] * 101])
    assert texts(tmp_path / "x") == []


def write(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as rows, rows:
        for statement in statements:
            rows.execute(statement)


def foreign(path: Path, facts: dict[str, Any]) -> None:
    write(path, "create table answers (tokens)")


def later_version(path: Path, facts: dict[str, Any]) -> None:
    AnswerFile(path, facts)
    write(path, "pragma user_version = 2")


def of_rollouts(path: Path, facts: dict[str, Any]) -> None:
    hf_spec.RolloutHistory().save(path)


def torn(path: Path, facts: dict[str, Any]) -> None:
    AnswerFile(path, facts).add([[number] * 2000 for number in range(50)])
    path.write_bytes(path.read_bytes()[:9000])


def broken_facts(path: Path, facts: dict[str, Any]) -> None:
    AnswerFile(path, facts)
    write(path, "update facts set value = '{'")


def no_tokens(path: Path, facts: dict[str, Any]) -> None:
    AnswerFile(path, facts)
    write(path, "drop table answers", "create table answers (id, tokens)",
          "insert into answers values (1, 'x')")  # fmt: skip


def other_tokenizer(path: Path, facts: dict[str, Any]) -> None:
    AnswerFile(path, {**facts, "vocab_size": 50})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path, _: path.write_text("no SQLite file, and longer than its header " * 9),
         "must be a new file, or one of earlier answers for lookups: file is not a database"),
        (foreign, "must be a new file, or .*: it holds something else"),
        (later_version, "it holds something else"),
        (of_rollouts, "it holds something else"),
        (torn, "answers' (is damaged|must be a new file, or .*): .*malformed"),
        (broken_facts, "its facts are broken"),
        (no_tokens, "is damaged: answer 1 holds no tokens"),
        (other_tokenizer, "the tokens of another tokenizer .vocab_size 50, not 61.: give a file"),
        (lambda path, _: path.mkdir(), "/answers. is a folder: give a file"),
    ],
)  # fmt: skip
def test_files_that_are_none(fresh: Any, tmp_path: Path, make: Any, message: str) -> None:
    """Are refused, and stay as they are."""
    model, path = fresh("llama"), tmp_path / "answers"
    make(path, tokenizer_facts(model.config))
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ValueError, match=message):
        model.generate(prompt(), **LONG, **drafting("prompt_lookup", lookup_history=str(path)))
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_folder_that_is_not_there(fresh: Any, tmp_path: Path) -> None:
    options = drafting("prompt_lookup", lookup_history=str(tmp_path / "none" / "answers"))
    with pytest.raises(ValueError, match="none/answers' is in a folder that does not exist: give"):
        fresh("llama").generate(prompt(), **LONG, **options)


def test_a_fixed_file_is_searched_and_not_changed(fresh: Any, tmp_path: Path) -> None:
    model, path = fresh("llama"), tmp_path / "answers"
    plain = model.generate(prompt(), **LONG)
    answer = plain[0, prompt().shape[1] :].tolist()
    AnswerFile(path, tokenizer_facts(model.config), fixed=True).add([answer])
    before = path.read_bytes()
    for ids in (prompt(), torch.tensor([[5, 6, 7]])):
        check_same(model, drafting("prompt_lookup", lookup_history=str(path)), ids, **LONG)
    assert path.read_bytes() == before and texts(path) == [answer]


def test_answers_that_cannot_be_written_cost_nothing_else(
    fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As while another process writes for long: a warning says so, once."""
    monkeypatch.setattr(lookup_file, "PATIENCE", 0.01)
    model, path = fresh("llama"), tmp_path / "answers"
    options = drafting("prompt_lookup", lookup_history=str(path))
    check_same(model, options, prompt(), **LONG)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        for token in (5, 6):
            with caplog.at_level(logging.WARNING, "hf_spec"):
                check_same(model, options, torch.tensor([[token, 4, 3]]), **LONG)
    assert caplog.text.count("answers cannot be kept in") == 1 and "is locked" in caplog.text
    assert len(texts(path)) == 1
    check_same(model, options, torch.tensor([[5, 4, 3]]), **LONG)
    assert len(texts(path)) == 2


def test_answers_are_found_although_those_before_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while another process reads for long: then the end of a transaction fails."""
    monkeypatch.setattr(lookup_file, "PATIENCE", 0.01)
    path = tmp_path / "answers"
    history = LastingHistory(path, Config())
    history.add([[3, 4, 5]])
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin")
        other.execute("select * from answers").fetchone()
        history.add([[6, 7, 8]])
    history.add([[9, 10, 11]])
    assert texts(path) == [[3, 4, 5], [9, 10, 11]] and history._file.size == 6
    assert found(history.matches([1, 9], Limits())) == [(1, [10, 11])]
    assert not history.matches([1, 6], Limits())


def test_models_and_paths_of_a_history(fresh: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """One for each file, however it is named."""
    monkeypatch.chdir(tmp_path)
    model = fresh("llama")
    one = history_of(model, "answers")
    assert one is history_of(model, os.path.join(tmp_path, "answers")) and one is not None
    assert history_of(model, 0) is None and history_of(model, 10) is history_of(model, 10)
    assert history_of(model, "other") is not one


def test_a_stored_configuration_names_no_file(tmp_path: Path) -> None:
    """As it may be another's, and calls write to the file."""
    options = {"lookup_history": str(tmp_path / "answers")}
    hf_spec.SpecConfig("prompt_lookup", options).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its lookup_history='.*answers' is a file of the machine"):
        hf_spec.SpecConfig.from_pretrained(tmp_path)
    config = hf_spec.SpecConfig.from_pretrained(tmp_path, assistant_kwargs=options)
    assert config.assistant_kwargs == options


@pytest.mark.parametrize("kind", ["adapter", "model", "options alone"])
def test_a_download_makes_calls_write_no_file(fresh: Any, tmp_path: Path, kind: str) -> None:
    """Neither the options beside an adapter that ``auto`` takes, nor a model's own, which calls
    that name a strategy take, too."""
    model, place, stored = fresh("llama"), tmp_path / "answers", tmp_path / "stored"
    if kind == "adapter":
        get_peft_model(fresh("llama"), hf_spec.MedusaConfig(num_heads=2)).save_pretrained(stored)
    else:
        model.save_pretrained(stored)
    config = hf_spec.SpecConfig("medusa", {"lookup_history": str(place)})
    if kind == "options alone":
        config.assistant_strategy = None
    config.save_pretrained(stored)
    with pytest.raises(ValueError, match="stored': its lookup_history='.*answers' is a file"):
        if kind != "adapter":
            AutoModelForCausalLM.from_pretrained(stored)
        model.load_adapter(str(stored))
        model.generate(torch.tensor([[5, 4, 3]]), assistant_strategy="auto", max_new_tokens=3)
    assert not place.exists()


def test_bad_values() -> None:
    for value in ("", 1.5, None):
        with pytest.raises(ValueError, match=f"lookup_history={value!r}.*Or give the path"):
            DraftOptions(lookup_history=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lookup_history='x' with lookup=False"):
        DraftOptions(lookup_history="x", lookup=False)
