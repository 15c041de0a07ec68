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
from hf_spec.tools.bench.prompts import encode, encode_answer, encode_prompt, read_prompts, usable
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


#: Of these the answer to the turn before is learned, too.
LEARNED = ("OpenAI, turns", "messages go first")


def check_alike(path: Path, names: list[str]) -> None:
    """All commands find the question Q and the answer A behind the messages of these formats."""
    histories = [FORMATS[name][1] for name in names]
    expected = [(Q, tuple(Message(**one) for one in history), A) for history in histories]
    prompts = read_prompts(path)
    assert [(one.text, one.history, one.reference) for one in prompts] == expected
    assert read_sources([path])[0] == [replace(one, source=path.name) for one in prompts]
    for chat in (True, False):
        tokenizer = make_tokenizer(chat)
        rows = iter(read_answers(path, tokenizer))
        for name, (text, history, answer) in zip(names, expected, strict=True):
            prompt, earlier = encode(tokenizer, text, history), []
            hello = encode_answer(tokenizer, "Hello.")
            if name in LEARNED and chat:
                start = next(i for i in range(len(prompt)) if prompt[i : i + len(hello)] == hello)
                earlier = [[start, start + len(hello)]]
            elif name in LEARNED:  # the next turn's prompt has no EOS behind it
                row = next(rows)
                assert row["prompt_ids"] == encode(tokenizer, "Hi.", history[:-2])
                assert (row["answer_ids"], row["earlier_answers"]) == (hello, [])
            row = next(rows)
            assert row["prompt_ids"] == prompt and row["earlier_answers"] == earlier
            assert row["answer_ids"] == encode_answer(tokenizer, answer)
            assert row["answer"] == answer and row["prompt"].endswith(text)
            assert len(row) == 5
        assert next(rows, None) is None


def test_every_command_reads_every_format_alike(tmp_path):
    rows = [row for row, _ in FORMATS.values()]
    (tmp_path / "x.jsonl").write_text(as_lines(rows), encoding="utf-8")
    check_alike(tmp_path / "x.jsonl", [*FORMATS])


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_command_reads_a_kind_of_file_alike(tmp_path, name):
    formats = ["TRL, turns", "TRL"]
    (tmp_path / name).write_bytes(CONTAINERS[name]([FORMATS[one][0] for one in formats]))
    check_alike(tmp_path / name, formats)


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
        (b'{"messages": [{"role": "system", "content": "a"}]}', "a tool's, it is the system"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "a tool's, it is the ass"),
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


CALL = {
    "role": "assistant", "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}  # fmt: skip
RESULT = {"role": "tool", "name": "add", "content": "3"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
#: Shows all that it is given. Thoughts are shown in the last turn only.
OF_TOOLS = (
    "{% if tools %}({{ tools[0].function.name }}){% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content and loop.last %}[{{ m.reasoning_content }}]{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{% for part in m.content %}{{ part.type }}:{{ part[part.type] }} {% endfor %}{% endif %}"
    "{% if m.tool_calls %}{call {{ m.tool_calls[0].function.arguments | tojson }}}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REFUSES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
)


def learned(path: Path, tokenizer: Any) -> list[list[str]]:
    """Each example's text, cut where an answer that is learned begins or ends: texts of even places
    are given, those of odd places are learned."""
    found = []
    for row in read_answers(path, tokenizer):
        ids = row["prompt_ids"] + row["answer_ids"]
        edges = [0, *(one for span in row["earlier_answers"] for one in span)]
        edges += [len(row["prompt_ids"]), len(ids)]
        found.append([tokenizer.decode(ids[a:b]) for a, b in zip(edges, edges[1:])])
    return found


@pytest.fixture
def tools() -> Any:
    """A tokenizer whose template shows tools."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = OF_TOOLS
    return tokenizer


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(as_lines(rows), encoding="utf-8")
    return path


def test_calls_of_tools_go_to_the_template_as_they_are(tmp_path: Path, tools: Any) -> None:
    """Also those that are the answer; tools may be a text of JSON."""
    hi = {"role": "user", "content": "Hi."}
    rows = [
        {"messages": [USER, CALL, RESULT, REPLY, hi], "tools": TOOLS},
        {"messages": [USER, CALL, RESULT, REPLY], "tools": json.dumps(TOOLS)},
        {"messages": [USER, CALL, RESULT], "tools": []},
    ]
    path = write(tmp_path / "chats.jsonl", rows)
    prompts = read_prompts(path)
    assert [prompt.tools for prompt in prompts] == [TOOLS, TOOLS, None]
    called = f'<|user|>{Q}<|end|>\n<|assistant|>{{call {{"a": 1}}}}<|end|>\n<|tool|>3<|end|>\n'
    assert [tools.decode(encode_prompt(tools, prompt)) for prompt in prompts] == [
        f"(add){called}<|assistant|>{A}<|end|>\n<|user|>Hi.<|end|>\n<|assistant|>",
        f"(add){called}<|assistant|>",
        f"{called}<|assistant|>",
    ]
    asked, call = f"<|user|>{Q}<|end|>\n<|assistant|>", '{call {"a": 1}}<|end|>'
    between = "\n<|tool|>3<|end|>\n<|assistant|>"
    whole = [f"(add){asked}", call, between, f"{A}<|end|>"]
    assert learned(path, tools) == [whole, whole, [asked, call]]


def test_thoughts_go_to_the_template_as_they_are(tmp_path: Path, tools: Any) -> None:
    """In a field, or as parts. Where a template drops those of earlier turns, each turn is an
    example."""
    thinks = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}]
    a, b = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = [{"messages": [a, thinks, a, b]}, {"messages": [a, {**b, "content": parts}, a, b]}]
    path = write(tmp_path / "chats.jsonl", rows)
    asked = "<|user|>a<|end|>\n<|assistant|>"
    assert learned(path, tools) == [
        [asked, "[hm]b<|end|>"],
        [f"{asked}b<|end|>\n{asked}", "b<|end|>"],
        [asked, "thinking:hm text:b <|end|>", f"\n{asked}", "b<|end|>"],
    ]


def test_a_template_says_what_the_assistant_says(tmp_path: Path) -> None:
    """By its own marks, which here have no EOS; what TRL gives as the prompt is not learned."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|user|>{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|user|>{% endif %}"
    )
    rows = [
        {"messages": [*EARLIER, USER, REPLY]},
        {"prompt": [*EARLIER, USER], "completion": [REPLY]},
    ]
    path = write(tmp_path / "chats.jsonl", rows)
    asked = f"<|end|><|user|>{Q}<|end|><|user|>"
    assert learned(path, tokenizer) == [
        ["<|user|>Hi.<|end|><|user|>", "Hello.", asked, A],
        [f"<|user|>Hi.<|end|><|user|>Hello.{asked}", A],
    ]
    tokenizer.chat_template = tokenizer.chat_template.replace("== 'assistant'", "== 'x'")
    with pytest.raises(ValueError, match=r"line 1: .*marks none of it .*all 2 rows\)$"):
        read_answers(path, tokenizer)


def test_rows_that_the_template_refuses_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simple, refused = {"messages": [USER, REPLY]}, {"messages": [USER, CALL, RESULT, REPLY]}
    path = write(tmp_path / "chats.jsonl", [simple, refused, simple, *[refused] * 11])
    tokenizer = make_tokenizer()
    tokenizer.chat_template = REFUSES_TOOLS
    prompts = read_prompts(path)
    assert usable(tokenizer, prompts) == [prompts[0], prompts[2]]
    said = caplog.text
    caplog.clear()
    assert len(read_answers(path, tokenizer)) == 2
    for text in (said, caplog.text):
        assert re.search("left out: 12; the first: .*chats.jsonl, line 2: .*no tools; ", text)
        assert text.rstrip().endswith(f"; {path}, line 12; and 2 more")
    refusal = r"line 2: .*no tools \(and so are all 2 rows\)$"
    with pytest.raises(ValueError, match=refusal):
        usable(tokenizer, [prompts[1], prompts[3]])
    with pytest.raises(ValueError, match=refusal.replace("line 2", "line 1")):
        read_answers(write(tmp_path / "tools.jsonl", [refused] * 2), tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "calls of tools and thoughts need a chat template"),
        ("{{ messages[0].content + messages[-1].content.x }}", "refuses messages"),
        ("{{ messages | length }}", "does not put the answer behind the prompt"),
    ],
)
def test_a_call_that_cannot_be_learned(tmp_path: Path, template: str | None, message: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"x.jsonl, line 1: .*{message}"):
        read_answers(write(tmp_path / "x.jsonl", [{"messages": [USER, CALL]}]), tokenizer)


@pytest.mark.parametrize(
    ("tools", "message"),
    [("[{", "'tools': not JSON"), ("3", "must be a list of objects"), ([3], "list of objects")],
)
def test_tools_that_are_none(tmp_path: Path, tools: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"line 1: .*{message}"):
        read_prompts(write(tmp_path / "x.jsonl", [{"messages": [USER], "tools": tools}]))


def test_objects_of_parquet_have_no_fields_of_other_rows(tmp_path: Path, tools: Any) -> None:
    """Those that are null there, as all rows have the same fields."""
    other = {**CALL, "tool_calls": [{"function": {"name": "mul", "arguments": {"b": 2}}}]}
    rows = [{"messages": [USER, call, RESULT, REPLY]} for call in (CALL, other)]
    (tmp_path / "x.parquet").write_bytes(as_parquet(rows))
    texts = [
        tools.decode(encode_prompt(tools, one)) for one in read_prompts(tmp_path / "x.parquet")
    ]
    assert '{call {"a": 1}}' in texts[0] and '{call {"b": 2}}' in texts[1]


def test_every_turn_of_the_assistant_s_is_a_prompt(tmp_path: Path) -> None:
    """After answers of the user or a tool; with other answers before, but where a tool was called
    what it said answers the call."""
    chat = [{"role": "assistant", "content": "Yes?"}, *EARLIER, USER, CALL, RESULT, REPLY, USER]
    (prompt,) = read_prompts(write(tmp_path / "x.jsonl", [{"messages": chat}]))
    turns = prompt.turns()
    assert [len(turn.messages) for turn in turns] == [2, 4, 6, 8] and turns[-1] is prompt
    known = [turn.answered and turn.answered.content for turn in turns]
    assert known == ["Hello.", "", A, None] and turns[1].answered.calls
    own = prompt.after({2: "own", 4: "never", 6: "last"})
    said = [message.content for message in own.messages]
    assert said == ["Yes?", "Hi.", "own", Q, "", "3", "last", Q]
    assert own.messages[4] == prompt.messages[4]


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
