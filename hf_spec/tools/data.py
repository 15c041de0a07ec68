"""Prompts and answers in files as people have them, which all commands read with this module; and
the progress bar of whatever takes more than a few seconds.

A file holds JSON lines or a JSON array of objects in UTF-8, or it is a parquet file. What it holds
is seen from its content, not its name. A name such as ``org/name``, ``org/name:split`` or
``org/name:split:column`` that is no file is a dataset of the Hub, ``org/name/config`` one of
several configurations; a folder, which may have ``:split:column``, too, is a dataset on disk. A row
is one of:

- a chat: ``messages`` (OpenAI, TRL), or ``conversations`` (ShareGPT). Its last message is the
  answer if it is the assistant's; what comes before is the prompt. ``tools`` beside it, a list or
  a text that holds one as JSON, goes to the chat template.
- a text: ``turns`` (Spec-Bench; the first, later ones follow the answer in suites), ``prompt`` or
  ``question``; or ``instruction``
  with ``input`` or ``context`` (Alpaca, Dolly). `ANSWER_FIELDS` may hold the answer. ``prompt`` and
  ``completion`` may be lists of messages (TRL).

The first of `PROMPT_FIELDS` that a row has is taken. A field that is null counts as missing.
Messages that call tools or think, and those of tools, go to the chat template as they are. Rows
that it refuses are left out and counted.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hf_spec.core.checks import explained, first_line, install_extra, nearest


@contextmanager
def progress_bar(title: str, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr; without a terminal, a line at once and every 30 seconds.

    Gives ``update(done, total, note="")``, whose note stands after the numbers.
    """
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    lines = "{desc}: {n_fmt} of {total_fmt}{postfix}, {remaining} left\n"
    with tqdm(
        desc=title, leave=False, dynamic_ncols=terminal, disable=not shown,
        mininterval=0.1 if terminal else 30, bar_format=None if terminal else lines, delay=1e-3,
        miniters=1,
    ) as bar:  # fmt: skip

        def update(done: int, total: int, note: str = "") -> None:
            first = bar.total is None
            if first:  # what was done before says nothing about the time left
                bar.initial = bar.n = done
            bar.total = total
            bar.set_postfix_str(note, refresh=first)
            bar.update(done - bar.n)

        yield update


DEFAULT_CATEGORY = "default"
#: Name of all categories together.
ALL = "all"
#: Fields that may hold the prompt, in order of preference; of chats, with the answer.
PROMPT_FIELDS = ("messages", "conversations", "turns", "prompt", "question", "instruction")
CHATS = ("messages", "conversations")
#: Fields that may hold the answer, in order of preference; of a list of texts, the first is taken.
ANSWER_FIELDS = ("answer", "completion", "output", "response", "reference")
#: What an ``instruction`` is about.
INPUT_FIELDS = ("input", "context")
#: What a chat's assistant can call.
TOOLS = "tools"
#: Prompts and answers as token ids.
TOKEN_COLUMNS = ("prompt_ids", "answer_ids")
#: All fields that are read.
READ = {
    *PROMPT_FIELDS, *ANSWER_FIELDS, *INPUT_FIELDS, *TOKEN_COLUMNS, TOOLS, "system", "category",
    "question_id",
}  # fmt: skip
#: Fields whose rows may have a system prompt beside them, in ``system``.
WITH_SYSTEM = ("conversations", "instruction")
#: Roles of a chat template by the names that files have for them.
ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "human": "user",
    "gpt": "assistant",
}  # fmt: skip
#: Further roles, which go to the chat template as they are.
OF_TOOLS = ("tool", "function", "developer")
#: Fields of a message that hold its role and its text.
_FIELDS = ("role", "from", "content", "value")
#: Roles that the assistant answers.
ASKING = ("user", "tool", "function")
#: Types of parts of a message that are no text, but for the chat template; and fields beside its
#: content in which an assistant says something.
THOUGHTS = ("thinking", "reasoning")
APART = ("tool_calls", "function_call", "reasoning_content", *THOUGHTS)
ACCEPTED = (
    "a file holds JSON lines, a JSON array of objects or parquet; "
    "datasets.load_dataset('csv', data_files=FILE)['train'].to_json('FILE.jsonl') converts others"
)
PARQUET = b"PAR1"
#: A dataset of the Hub, perhaps with a configuration, a split and a column.
DATASET = re.compile(r"[\w.-]+(/[\w.-]+){1,2}(:[^:]*){0,2}")
#: How names of files end, which are no datasets of the Hub.
FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".gz")
#: A folder that ``datasets.save_to_disk`` has written has one of these.
SAVED = ("state.json", "dataset_dict.json")
#: Split of a dataset that has several.
DEFAULT_SPLIT = "train"

#: Rows that are left out beside the first that a warning names.
NAMED = 9

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """A row of a file: where it is, for errors, its line in a file of JSON lines, else its
    position, both from 1, and its content."""

    place: str
    number: int
    fields: dict[str, Any]


class Message(NamedTuple):
    """A message of a chat; ``role`` is one of :data:`ROLES`, or :data:`OF_TOOLS`.

    Attributes:
        content: its text; empty if it has none.
        given: the message as the file has it, if it is more than its text: it calls a tool, is a
            tool's, or thinks.
    """

    role: str
    content: str
    given: Any = None

    @property
    def for_template(self) -> dict[str, Any]:
        """What a chat template gets."""
        return self.given or {"role": self.role, "content": self.content}

    def saying(self, text: str) -> Message:
        """The same with another text."""
        given = self.given and {**self.given, "content": text}
        return Message(self.role, text, given)

    @property
    def calls(self) -> bool:
        """Whether it calls a tool."""
        return bool(self.given and self.given.get("tool_calls"))

    @property
    def is_text(self) -> bool:
        """Whether its content is all that it says: no calls and no thoughts."""
        given = self.given or {}
        return not isinstance(given.get("content"), list) and not any(map(given.get, APART))

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return self.is_text and not self.content.strip()


def _said(messages: Sequence[Message], answer: Message | None) -> dict[str, Any]:
    """The fields of a :class:`Prompt` for its messages, and the answer."""
    *history, last = messages
    known = answer if answer and not answer.is_empty else None
    return {
        "text": last.content, "history": tuple(history), "asking": last if last.given else None,
        "reference": known.content if known and known.content.strip() else None,
        "answer": known if known and known.given else None,
    }  # fmt: skip


class LeftOut(ValueError):
    """A row that cannot be used, though nothing is wrong with its file."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, with its answer if the file has one.

    Attributes:
        text: the prompt as text, without a chat template; of a chat, that of its last message.
        category: results are reported for each.
        question_id: the number of its row if the file gives none.
        reference: the answer's text; None if there is none.
        history: the messages of a chat before the last one.
        source: name of its file, if that is of interest.
        asking: the last message, if it is more than a text of the user's.
        answer: the answer, if it is more than its text.
        tools: what the assistant can call; None: nothing.
        given: number of first messages that are no part of the answers (TRL's ``prompt``).
        place: where its row is.
        later: what the user says after the answer, and after the answer to that.
    """

    text: str
    category: str = DEFAULT_CATEGORY
    question_id: int | str = 0
    reference: str | None = None
    history: tuple[Message, ...] = ()
    source: str = ""
    asking: Message | None = None
    answer: Message | None = None
    tools: Sequence[Any] | None = None
    given: int = 0
    place: str = ""
    later: tuple[str, ...] = ()

    @property
    def full_text(self) -> str:
        """The whole prompt as text, without roles."""
        return plain_text(self.text, self.history)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of the prompt."""
        return (*self.history, self.asking or Message("user", self.text))

    @property
    def answered(self) -> Message | None:
        """The message that answers it."""
        told = self.reference is not None
        return self.answer or (Message("assistant", str(self.reference)) if told else None)

    def turns(self) -> list[Prompt]:
        """A prompt for each of the assistant's turns, the last of which is this one."""
        earlier = []
        for place, message in enumerate(self.history):
            before = self.history[place - 1] if place else None
            answers = message.role == "assistant" and place >= self.given
            if answers and before and before.role in ASKING:
                earlier.append(replace(self, **_said(self.history[:place], message)))
        return [*earlier, self]

    def of(self, messages: Sequence[Message]) -> Prompt:
        """The same with other messages."""
        return replace(self, **_said(messages, self.answered))

    def after(self, answers: Mapping[int, str]) -> Prompt:
        """The prompt with other answers in its earlier turns, by their places. One that called a
        tool stays, as what the tool said is the answer to that call."""
        history = [
            Message("assistant", answers[place])
            if place in answers and not message.calls
            else message
            for place, message in enumerate(self.history)
        ]
        return replace(self, history=tuple(history))


def plain_text(text: str, history: Sequence[Message] = ()) -> str:
    """A prompt without roles: all messages, with blank lines between them."""
    said = [message.content for message in history if message.content or not message.given]
    return "\n\n".join([*said, text])


class Named(NamedTuple):
    """A dataset by its name: a folder, or ``org/name`` on the Hub, and what is taken of it."""

    place: str
    split: str = ""
    column: str = ""

    @property
    def on_hub(self) -> bool:
        return not Path(self.place).is_dir()


def dataset_named(name: str | Path) -> Named | None:
    """The dataset of this name; None if it is a file. What lies on disk goes before the Hub."""
    text = str(name)
    if Path(text).is_file():
        return None
    if Path(text).is_dir():
        return Named(text)
    place, *parts = text.split(":")
    if len(parts) <= 2 and Path(place).is_dir():
        return Named(place, *parts)
    if DATASET.fullmatch(text) and not place.endswith(FILES) and not place.startswith("."):
        return Named(place, *parts)
    return None


def hub_name(name: str | Path) -> str | None:
    """The repository of a dataset on the Hub, ``org/name``; None if the name is not of one."""
    named = dataset_named(name)
    return "/".join(named.place.split("/")[:2]) if named and named.on_hub else None


def label(name: str | Path) -> str:
    """A name without the folders of this machine; that of a dataset of the Hub stays."""
    named = dataset_named(name)
    return str(name) if named and named.on_hub else Path(name).name


def sha256(name: str | Path) -> str:
    """SHA-256 of a file, or of the rows of a dataset by name."""
    named = dataset_named(name)
    if named is None:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for row in _dataset_rows(named):
        digest.update(json.dumps(row.fields, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def load_named(named: Named) -> Any:
    """The ``datasets.Dataset`` of a name, from disk or the Hub; a ValueError says what is wrong."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{named.place!r} is no file, and a dataset needs the library datasets; "
            f"{install_extra('train')}"
        ) from error
    repository, config = named.place, None
    if named.on_hub and named.place.count("/") == 2:
        repository, _, config = named.place.rpartition("/")
    what = f"there is no file {named.place!r}, and no such dataset could be read from the Hub"
    if not named.on_hub:
        what = f"cannot read the folder {named.place!r} as a dataset"
    kinds = OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError
    with quiet(), explained(what, *kinds):
        if any(Path(named.place, name).is_file() for name in SAVED):
            found = datasets.load_from_disk(named.place)
        else:
            found = datasets.load_dataset(repository, config)
    return _column_of(named, _split_of(named, found))


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block ``datasets`` logs nothing, and the Hub errors only: what is raised says
    enough, and the Hub's retries would bury it."""
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)


def _split_of(named: Named, found: Any) -> Any:
    """The split that is named; else the only one, or that for training."""
    splits = found if isinstance(found, dict) else {"": found}
    names = [str(name) for name in splits]
    default = names[0] if len(names) == 1 else DEFAULT_SPLIT
    wanted = named.split or default
    if wanted not in names:
        raise ValueError(
            f"dataset {named.place!r} has no split {wanted!r}{nearest(wanted, names)}; it has "
            f"{', '.join(filter(None, names)) or 'none'}"
        )
    return splits[wanted]


def _column_of(named: Named, data: Any) -> Any:
    """The columns that are read: if one is named, it is the prompt, whatever it is called."""
    columns = list(data.column_names)
    known = [name for name in columns if name in PROMPT_FIELDS]
    if named.column:
        if named.column not in columns:
            raise ValueError(
                f"dataset {named.place!r} has no column {named.column!r}"
                f"{nearest(named.column, columns)}; it has {', '.join(columns)}"
            )
        data = data.remove_columns([name for name in known if name != named.column])
        if named.column not in PROMPT_FIELDS:
            chats = isinstance(data[0][named.column], list) if len(data) else False
            data = data.rename_column(named.column, "messages" if chats else "prompt")
    elif not known and not {*TOKEN_COLUMNS} <= {*columns}:
        raise ValueError(
            f"dataset {named.place!r} has none of the columns {', '.join(PROMPT_FIELDS)}; it has "
            f"{', '.join(columns)}: name the one with the prompts, as in "
            f"{named.place}:{named.split or DEFAULT_SPLIT}:{columns[0]}"
        )
    return data.select_columns([name for name in data.column_names if name in READ])


def _dataset_rows(named: Named) -> Iterator[Row]:
    for number, fields in enumerate(load_named(named), start=1):
        yield Row(f"{named.place}, row {number}", number, _of_arrow(fields))


def _file_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            is_parquet = file.peek(len(PARQUET)).startswith(PARQUET)
            yield from _parquet_rows(path) if is_parquet else _json_rows(path, file)
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def read(path: str | Path, parse: Callable[[Row], T]) -> Iterator[T]:
    """What ``parse`` makes of each row of a file or a dataset; the row's place is put before its
    errors.

    A JSON array is read as a whole, other files in parts. An empty file has no rows. Rows that are
    :class:`LeftOut` are counted, and the log names the first.
    """
    left_out: list[tuple[str, str]] = []
    used, named = False, dataset_named(path)
    for row in _file_rows(Path(path)) if named is None else _dataset_rows(named):
        with explained(row.place, ValueError):
            if not isinstance(row.fields, dict):
                raise ValueError("must be a JSON object, such as {'prompt': '...'}")
            try:
                parsed = parse(row)
            except LeftOut as error:
                left_out.append((row.place, str(error)))
                continue
        used = True
        yield parsed
    report_left_out(left_out, used)


def report_left_out(rows: Sequence[tuple[str, str]], used: bool) -> None:
    """Warn of rows that are left out, of which each has its place and a reason; a ValueError if no
    row is used."""
    if not rows:
        return
    (place, why), *others = rows
    if not used:
        count = f" (and so are all {len(rows)} rows)" if others else ""
        raise ValueError(f"{place}: {why}{count}")
    named = "".join(f"; {other}" for other, _ in others[:NAMED])
    if len(others) > NAMED:
        named += f"; and {len(others) - NAMED} more"
    logger.warning("rows that are left out: %d; the first: %s: %s%s", len(rows), place, why, named)


def _json_rows(path: Path, file: io.BufferedReader) -> Iterator[Row]:
    lines = _lines(path, file)
    first = True
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if first and line.lstrip().startswith("["):
            # Blank lines in place of those before, so that errors name the right one.
            array = parse_json(str(path), "\n" * (number - 1) + line + "".join(lines), ACCEPTED)
            for position, fields in enumerate(array, start=1):
                yield Row(f"{path}, row {position}", position, fields)
            return
        place = f"{path}, line {number}"
        yield Row(place, number, parse_json(place, line, ACCEPTED if first else ""))
        first = False


def _lines(path: Path, file: io.BufferedReader) -> Iterator[str]:
    """Lines as text. They end at line feeds only: JSON texts may hold what else ends lines."""
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: byte {error.start + 1} of the line is "
                f"{line[error.start]:#04x}, not UTF-8; save the file as UTF-8"
            ) from error


def parse_json(place: str, text: str, hint: str = "") -> Any:
    """What a text of JSON says; a ValueError begins with its place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers may be too long, too
        reason = first_line(error)
        if isinstance(error, json.JSONDecodeError):
            line = f"line {error.lineno}, " if "\n" in text.rstrip() else ""
            reason = f"{error.msg} at {line}column {error.colno}"
        raise ValueError(f"{place}: not JSON ({reason}){hint and f': {hint}'}") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(
            f"{str(path)!r} is a parquet file, which needs pyarrow; run: pip install pyarrow"
        ) from error
    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=1000)
        rows = (fields for batch in batches for fields in batch.to_pylist())
        for number, fields in enumerate(rows, start=1):
            yield Row(f"{path}, row {number}", number, _of_arrow(fields))
    except pyarrow.ArrowException as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from error


def _of_arrow(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row of Arrow, whose objects have all fields that those of other rows have."""
    return {name: _without_nulls(value) for name, value in fields.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def example(row: Row) -> Prompt:
    """The prompt and the answer of a row."""
    given = {name: value for name, value in row.fields.items() if value is not None}
    name = next((name for name in PROMPT_FIELDS if name in given), None)
    if name is None:
        raise ValueError(
            f"needs one of the fields {', '.join(PROMPT_FIELDS)}; it has "
            f"{', '.join(map(str, given)) or 'none'}"
        )
    messages, answer = _prompt(name, given), None
    start = 0
    if name not in CHATS or messages[-1].role != "assistant":
        completion = _answer(given)
        start = len(messages) if completion else 0
        messages += completion
    if messages[-1].role == "assistant":
        answer = messages.pop()
    if not messages or messages[-1].role not in ASKING:
        role = messages[-1].role if messages else "assistant"
        kind = LeftOut if role in OF_TOOLS or (messages and messages[-1].given) else ValueError
        raise kind(f"{name!r}: the last message must be the user's or a tool's, it is the {role}'s")
    if messages[-1].is_empty and messages[-1].role == "user":
        raise ValueError(f"{name!r}: the user's last message is empty")
    category = str(given.get("category") or DEFAULT_CATEGORY)
    if category == ALL:
        raise ValueError(f"'category' must not be {ALL!r}, which is the name of the overall row")
    turns = given["turns"][1:] if name == "turns" else ()
    later = tuple(_text(name, one) for one in turns)
    return Prompt(
        category=category, question_id=given.get("question_id", row.number), given=start,
        tools=_tools(given.get(TOOLS)), place=row.place, later=later, **_said(messages, answer),
    )  # fmt: skip


def _tools(value: Any) -> list[Any] | None:
    """The tools of a chat; None if there are none."""
    found = parse_json(f"{TOOLS!r}", value) if isinstance(value, str) and value else value
    if found and not (isinstance(found, list) and all(isinstance(one, dict) for one in found)):
        raise ValueError(f"{TOOLS!r} must be a list of objects, or a text that holds one as JSON")
    return found or None


def _text(name: str, value: Any) -> str:
    """``value``; a ValueError if it is no text, or is empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name!r} must hold a text that is not empty")
    return value


def _prompt(name: str, given: Mapping[str, Any]) -> list[Message]:
    """The messages of the prompt; of a chat, with the answer."""
    value = given[name]
    if name in CHATS or (name == "prompt" and isinstance(value, list)):
        messages = _messages(name, value)
    else:
        if name == "turns":
            if not isinstance(value, list) or not value:
                raise ValueError("'turns' must be a list with at least one text")
            value = value[0]
        messages = [Message("user", _text(name, value))]
        about = [field for field in INPUT_FIELDS if given.get(field)]
        if name == "instruction" and about:
            text = plain_text(_text(about[0], given[about[0]]), messages)
            messages = [Message("user", text)]
    if name in WITH_SYSTEM and given.get("system"):
        messages.insert(0, Message("system", _text("system", given["system"])))
    return messages


def _answer(given: Mapping[str, Any]) -> list[Message]:
    """The messages that answer the prompt, as other fields have them."""
    for name in ANSWER_FIELDS:
        value = given.get(name)
        if isinstance(value, list) and value:
            if name == "completion" and isinstance(value[0], dict):
                return _messages(name, value)
            value = value[0]
        if isinstance(value, str) and value.strip():
            return [Message("assistant", _text(name, value))]
    return []


def _messages(name: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} must be a list of messages that is not empty")
    return [_message(f"message {i} of {name!r}", given) for i, given in enumerate(value, start=1)]


def _message(what: str, given: Any) -> Message:
    if not isinstance(given, dict):
        raise ValueError(f"{what} must be an object with role and content, or from and value")
    role, content = given.get("role") or given.get("from"), given.get("content")
    if content is None:
        content = given.get("value")
    if not isinstance(role, str) or role not in (*ROLES, *OF_TOOLS):
        known = ", ".join((*ROLES, *OF_TOOLS))
        raise ValueError(f"{what} has the role {role!r}; it must be one of {known}")
    role = ROLES.get(role, role)
    more = {key: given[key] for key in given if key not in _FIELDS and given[key] is not None}
    if isinstance(content, list):
        content = _joined(content)
    thinks = isinstance(content, list) and all(
        _is_thought(part) or _text_of(part) is not None for part in content
    )
    fits = isinstance(content, str) or thinks or (content is None and bool(more))
    if not fits and role not in OF_TOOLS:
        raise ValueError(f"{what} must hold text, or a list of parts that are all text")
    whole = {**more, "role": role, "content": content} if role in OF_TOOLS or more or thinks else {}
    said = content if isinstance(content, list) else [content]
    return Message(role, "".join(filter(None, map(_text_of, said))), whole or None)


def _joined(parts: list[Any]) -> Any:
    """The text of parts that are all text, which is what most templates take; else the parts."""
    texts = list(map(_text_of, parts))
    return parts if None in texts else "".join(filter(None, texts))


def _text_of(part: Any) -> str | None:
    """The text of a part of a message; None if it is something else."""
    found = part.get("text") if isinstance(part, dict) and not _is_thought(part) else part
    return found if isinstance(found, str) else None


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in THOUGHTS
