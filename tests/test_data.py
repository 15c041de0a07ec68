"""Files of prompts and answers: every command reads each format alike, or says what is wrong."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import make_tokenizer

from hf_spec.tools import cli
from hf_spec.tools.bench.prompts import encode, encode_answer, read_prompts, usable
from hf_spec.tools.data import Message, hub_name, label, sha256
from hf_spec.tools.training.dataset import read_answers
from hf_spec.tools.training.distill import read_sources

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

Q, A = "Write “add” in Python. 🐍", "def add(a, b):\n    return a\u2028+ b"
USER, REPLY = {"role": "user", "content": Q}, {"role": "assistant", "content": A}
EARLIER = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = [{"type": "text", "text": Q[:5]}, {"type": "text", "text": Q[5:]}]
HUMAN, GPT = {"from": "human", "value": Q}, {"from": "gpt", "value": A}

#: Rows, and the messages before the question Q, which A answers.
FORMATS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "prompt and answer": ({"prompt": Q, "answer": A}, []),
    "prompt and completion": ({"prompt": Q, "completion": A}, []),
    "prompt and response": ({"prompt": Q, "response": A}, []),
    "question and answer": ({"question": Q, "answer": A, "category": "c"}, []),
    "references": ({"turns": [Q, "unused"], "reference": [A, "unused"]}, []),
    "OpenAI": ({"messages": [USER, REPLY]}, []),
    "OpenAI, parts": ({"messages": [{**USER, "content": PARTS}, REPLY]}, []),
    "OpenAI, turns": ({"messages": [SYSTEM, *EARLIER, USER, REPLY]}, [SYSTEM, *EARLIER]),
    "messages go first": ({"prompt": "Hi.", "messages": [*EARLIER, USER, REPLY]}, EARLIER),
    "a chat's own answer": ({"messages": [USER, REPLY], "answer": "short"}, []),
    "ShareGPT": ({"conversations": [HUMAN, GPT]}, []),
    "ShareGPT, system": ({"conversations": [HUMAN, GPT], "system": "Be brief."}, [SYSTEM]),
    "ShareGPT, roles": ({"conversations": [{"from": "system", "value": "Be brief."},
                         {"from": "user", "value": Q}, {"from": "assistant", "value": A}]},
                        [SYSTEM]),
    "Alpaca": ({"instruction": Q, "input": "", "output": A}, []),
    "Alpaca, null": ({"instruction": Q, "input": None, "output": A, "prompt": None}, []),
    "TRL": ({"prompt": [USER], "completion": [REPLY]}, []),
    "TRL, turns": ({"prompt": [*EARLIER, USER], "completion": [REPLY]}, EARLIER),
    "TRL, text": ({"prompt": [SYSTEM, USER], "completion": A}, [SYSTEM]),
    "TRL, one list": ({"prompt": [USER, REPLY]}, []),
}  # fmt: skip


def as_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


#: Files by suffix, from rows.
CONTAINERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "plain.jsonl": lambda rows: as_lines(rows).encode(),
    "crlf.jsonl": lambda rows: as_lines(rows).replace("\n", "\r\n").encode(),
    "escaped.jsonl": lambda rows: "\n\n".join(map(json.dumps, rows)).encode(),
    "bom.jsonl": lambda rows: as_lines(rows).encode("utf-8-sig"),
    "array.json": lambda rows: json.dumps(rows).encode(),
    "indented.json": lambda rows: ("\n" + json.dumps(rows, indent=2)).encode(),
    "rows.parquet": as_parquet,
    "without-suffix": as_parquet,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep datasets out of the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def check_alike(path: Path, histories: list[list[dict[str, str]]]) -> None:
    """All commands find the question Q and the answer A behind these messages."""
    expected = [(Q, tuple(Message(**one) for one in history), A) for history in histories]
    prompts = read_prompts(path)
    assert [(one.text, one.history, one.reference) for one in prompts] == expected
    assert read_sources([path])[0] == [replace(one, source=path.name) for one in prompts]
    for chat in (True, False):
        tokenizer = make_tokenizer(chat)
        for row, (text, history, answer) in zip(
            read_answers(path, tokenizer), expected, strict=True
        ):
            assert row["prompt_ids"] == encode(tokenizer, text, history)
            assert row["answer_ids"] == encode_answer(tokenizer, answer)
            assert row["answer"] == answer and row["prompt"].endswith(text)
            assert len(row) == 4


def test_every_command_reads_every_format_alike(tmp_path):
    rows, histories = zip(*FORMATS.values())
    (tmp_path / "x.jsonl").write_text(as_lines(list(rows)), encoding="utf-8")
    check_alike(tmp_path / "x.jsonl", list(histories))


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_command_reads_a_kind_of_file_alike(tmp_path, name):
    rows, histories = zip(FORMATS["TRL, turns"], FORMATS["TRL"])
    (tmp_path / name).write_bytes(CONTAINERS[name](list(rows)))
    check_alike(tmp_path / name, list(histories))


def test_an_input_follows_its_instruction(tmp_path):
    rows = [{"instruction": "Add.", "input": "1, 2"}, {"instruction": "Add.", "context": "1, 2"}]
    (tmp_path / "x.jsonl").write_text(as_lines(rows))
    assert [one.text for one in read_prompts(tmp_path / "x.jsonl")] == ["Add.\n\n1, 2"] * 2


def test_ids_are_lines_or_positions_in_an_array(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "question_id": None, "category": None}]
    rows.append({"turns": ["c", "d"], "question_id": 81, "category": "chat"})
    for text, ids in ((f"\n\n{as_lines(rows)}", [3, 4, 81]), (json.dumps(rows), [1, 2, 81])):
        (tmp_path / "x").write_text(text)
        read = read_prompts(tmp_path / "x")
        assert [one.question_id for one in read] == ids
        assert [one.category for one in read] == ["default", "default", "chat"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'\n{"prompt": "caf\x81", "answer": "b"}',
         "x, line 2: byte 16 of the line is 0x81, not UTF-8; save the file as UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "x, line 1: byte 1 of the line is 0xff, not UTF-8"),
        (b'{"prompt": "a",}', r"line 1: not JSON \(.* at column 1\d\): a file holds JSON lines, a"),
        (b'{"prompt": "a", "answer": "b"}\n{"prompt"', r"x, line 2: not JSON \(.* column 10\)$"),
        (b'\n[{"prompt": "a"},\n {"prompt" "b"}]', r"not JSON \(.* at line 3, column 12\)"),
        (b"prompt,answer\na,b\n", "line 1: not JSON .*load_dataset\\('csv'.* converts others"),
        (b"3\n", r"line 1: must be a JSON object, such as \{'prompt'"),
        (b'[{"prompt": "a", "answer": "b"}, "c"]', "x, row 2: must be a JSON object"),
        (b'{"text": "a", "id": 3}', "line 1: needs one of the fields mess.* has text, id"),
        (b"{}", "needs one of the fields .*; it has none"),
        (b'{"prompt": " ", "answer": "b"}', "'prompt' must hold a text that is not empty"),
        (b'{"messages": []}', "'messages' must be a list of messages that is not empty"),
        (b'{"messages": "a"}', "'messages' must be a list of messages that is not empty"),
        (b'{"messages": ["a"]}', "message 1 of 'messages' must be an object with role and content"),
        (b'{"messages": [{"role": "tools", "content": "a"}]}', "the role 'tools'; it must be one"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "all text"),
        (b'{"messages": [{"role": "user", "content": " "}]}', "the user's last message is empty"),
        (b'{"messages": [{"role": "system", "content": "a"}]}', "be the user's, it is the system"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "be the user's, it is the ass"),
        (b'{"turns": []}', "'turns' must be a list with at least one text"),
        (b'{"prompt": "a", "answer": "b", "category": "all"}', "'category' must not be 'all'"),
        (b"PAR1 broken", "cannot read '.*x': .*arquet"),
        (b" \n", "no"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(tmp_path, content, message):
    (tmp_path / "x").write_bytes(content)
    for read in (read_prompts, lambda path: read_answers(path, make_tokenizer())):
        with pytest.raises(ValueError, match=message) as caught:
            read(tmp_path / "x")
        assert type(caught.value) is ValueError and "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [{}, {"answer": " "}, {"answer": 3}, {"answer": [{"a": 1}]}])
def test_prompts_alone_are_for_prompts_alone(tmp_path, answer):
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a"} | answer]
    (tmp_path / "x").write_text(as_lines(rows))
    assert [one.reference for one in read_prompts(tmp_path / "x")] == ["b", None]
    with pytest.raises(ValueError, match="x, line 2: has no answer to train on: give a text in"):
        read_answers(tmp_path / "x", make_tokenizer())


def test_a_template_that_refuses_a_role_is_reported_with_the_row(tmp_path):
    row, _ = FORMATS["OpenAI, turns"]
    (tmp_path / "x").write_text(as_lines([row]), encoding="utf-8")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(ValueError, match="x, line 1: the tokenizer's chat template refuses .*: no"):
        read_answers(tmp_path / "x", tokenizer)


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
RESULT = {"role": "tool", "name": "add", "content": "3"}


def test_messages_of_tools(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They go to the template as they are. Where it refuses them, and where a tool speaks last, the
    row is left out; the others are used."""
    rows = [
        {"messages": [USER, REPLY]},
        {"messages": [USER, CALL, RESULT, REPLY, USER, REPLY]},
        {"messages": [USER, CALL, RESULT, REPLY]},
        {"messages": [USER, REPLY]},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text(as_lines(rows))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}{% if m.tool_calls %}:{{ m.tool_calls[0].function.name"
        " }}{% endif %}]{% if m.content is not none %}{{ m.content }}{% endif %}{% endfor %}"
    )
    prompts = read_prompts(path)
    assert [len(prompt.history) for prompt in prompts] == [0, 4, 0]
    assert "left out: 1; the first" in caplog.text and "chats.jsonl, line 3: " in caplog.text
    found = tokenizer.decode(encode(tokenizer, prompts[1].text, prompts[1].history))
    assert found.endswith(f"[user]{Q}[assistant:add][tool]3[assistant]{A}[user]{Q}")
    assert usable(tokenizer, prompts) == prompts and len(read_answers(path, tokenizer)) == 3
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    caplog.clear()
    assert usable(tokenizer, prompts) == [prompts[0], prompts[2]]
    assert "left out: 1; the first: prompt, row 2: " in caplog.text and "no tools" in caplog.text
    assert len(read_answers(path, tokenizer)) == 2
    with pytest.raises(ValueError, match="no tools"):
        usable(tokenizer, prompts[1:2])


# -- datasets by name ----------------------------------------------------------------------------

ROWS = [{"question": Q, "answer": A, "task": "d"}, {"question": "b", "answer": "c", "task": "e"}]


def saved(folder: Path, splits: dict[str, list[dict[str, Any]]]) -> Path:
    """As ``save_to_disk`` writes one; a single split without a name is a Dataset."""
    made = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    one = made[""] if set(made) == {""} else datasets.DatasetDict(made)
    one.save_to_disk(folder)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """A Hub with ``org/name``, and what it was asked for."""
    asked: list[Any] = []
    parts = {"train": ROWS, "test": ROWS[1:]}
    made = {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}

    def load(name: str, config: str | None = None) -> Any:
        asked.append((name, config))
        if name != "org/name":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist.")
        return datasets.DatasetDict(made)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.chdir(tmp_path)
    return asked


def both(name: str) -> list[tuple[str, str | None]]:
    """Prompts and answers, as commands that measure and those that train read them."""
    prompts = [(one.text, one.reference) for one in read_prompts(name)]
    assert [one.source for one in read_sources([name])[0]] == [label(name)] * len(prompts)
    rows = read_answers(name, make_tokenizer())
    assert [(row["prompt"], row["answer"]) for row in rows] == prompts
    return prompts


def test_a_dataset_of_the_hub_by_name(hub):
    assert both("org/name") == both("org/name:train") == [(Q, A), ("b", "c")]
    assert both("org/name:test") == [("b", "c")]
    assert set(hub) == {("org/name", None)}
    assert both("org/name/main:test") == [("b", "c")] and hub[-1] == ("org/name", "main")
    assert both("org/name:test:task") == [("e", "c")]  # a column of any name
    assert (
        hub_name("org/name/main:test") == "org/name" and label("org/name:test") == "org/name:test"
    )
    assert sha256("org/name") == sha256("org/name:train") != sha256("org/name:test")


def test_what_lies_on_disk_goes_before_the_hub(hub, tmp_path):
    folder = saved(tmp_path / "org" / "name", {"test": ROWS[:1], "train": ROWS[1:]})
    assert both("org/name") == [("b", "c")] and both("org/name:test") == [(Q, A)]
    assert both(f"{folder}:test:question") == [(Q, A)]
    assert both(str(saved(tmp_path / "single", {"": ROWS}))) == [(Q, A), ("b", "c")]
    (tmp_path / "org" / "file").write_text(as_lines(ROWS), encoding="utf-8")
    assert both("org/file") == [(Q, A), ("b", "c")]
    assert not hub and hub_name("org/name") is None and label("org/name") == "name"


def test_a_folder_of_files_is_a_dataset_with_splits(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    for split, rows in (("train", ROWS[:1]), ("test", ROWS[1:])):
        (folder / f"{split}.jsonl").write_text(as_lines(rows), encoding="utf-8")
    assert [one.text for one in read_prompts(folder)] == [Q]
    assert both(f"{folder}:test") == [("b", "c")]


def test_chats_in_a_column_of_another_name(tmp_path):
    rows = [{"dialog": [USER, REPLY], "prompt": "not this one"}]
    saved(tmp_path / "x", {"train": rows})
    assert both(f"{tmp_path / 'x'}:train:dialog") == [(Q, A)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/none", "there is no file 'org/none', and no such dataset could be .*doesn't exist"),
        ("org/name:tets", r"no split 'tets' \(did you mean 'test'\?\); it has train, test"),
        ("org/name:test:questio", "no column 'questio'.*'question'.*it has question, answer, task"),
        ("org/none.jsonl", "cannot read 'org/none.jsonl': No such file"),
        ("none.jsonl:train", "cannot read 'none.jsonl:train': No such file"),
    ],
)
def test_a_name_that_leads_nowhere(hub, name, message, tmp_path, capsys):
    with pytest.raises(ValueError, match=message):
        read_prompts(name)
    (tmp_path / "M").mkdir()
    for words in (["bench", "-o", "o"], ["doctor"], ["distill", "-o", "o"]):
        assert cli.main([*words, "--model", "M", "--prompts", name]) == 2
        said = capsys.readouterr().err
        assert re.search(message, said) and said.count("\n") == 1


def test_a_dataset_without_a_column_of_prompts(tmp_path):
    folder = saved(tmp_path / "x", {"train": [{"text": "a", "level": 1}]})
    message = "none of the columns mess.*it has text, level: name .*:train:text"
    with pytest.raises(ValueError, match=message):
        read_prompts(folder)
    assert [one.text for one in read_prompts(f"{folder}:train:text")] == ["a"]


def test_a_name_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="'org/name' is no file, and a dataset needs the library"):
        read_prompts("org/name")
