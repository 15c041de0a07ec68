"""Prompts and answers in files as people have them, which all commands read with this module; and
the progress bar of whatever takes more than a few seconds.

A file holds JSON lines or a JSON array of objects in UTF-8, or it is a parquet file. What it holds
is seen from its content, not its name. A name such as ``org/name``, ``org/name:split`` or
``org/name:split:column`` that is no file is a dataset of the Hub, ``org/name/config`` one of
several configurations; a folder, which may have ``:split:column``, too, is a dataset on disk. A row
is one of:

- a chat: ``messages`` (OpenAI, TRL), or ``conversations`` (ShareGPT). Its last message is the
  answer if it is the assistant's; what comes before is the prompt.
- a text: ``turns`` (Spec-Bench; the first, later ones follow the answer in suites), ``prompt`` or
  ``question``; or ``instruction``
  with ``input`` or ``context`` (Alpaca, Dolly). `ANSWER_FIELDS` may hold the answer. ``prompt`` and
  ``completion`` may be lists of messages (TRL).

The first of `PROMPT_FIELDS` that a row has is taken. A field that is null counts as missing.
Messages that call tools, and those of tools, go to the chat template as they are. Rows that it
refuses, or in which a tool speaks last, are left out and counted.
"""

import hashlib
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
#: Prompts and answers as token ids.
TOKEN_COLUMNS = ("prompt_ids", "answer_ids")
#: All fields that are read.
READ = {
    *PROMPT_FIELDS, *ANSWER_FIELDS, *INPUT_FIELDS, *TOKEN_COLUMNS, "system", "category",
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
        given: the message as the file has it, if it calls a tool, or is its answer.
    """

    role: str
    content: str
    given: Any = None

    @property
    def for_template(self) -> dict[str, Any]:
        """What a chat template gets."""
        return self.given or {"role": self.role, "content": self.content}


class LeftOut(ValueError):
    """A row that cannot be used, though nothing is wrong with its file."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, with its answer if the file has one.

    Attributes:
        text: the prompt as text, without a chat template; of a chat, what the user says last.
        category: results are reported for each.
        question_id: the number of its row if the file gives none.
        reference: the answer; None if there is none.
        history: the messages of a chat before ``text``.
        source: name of its file, if that is of interest.
        later: what the user says after the answer, and after the answer to that.
    """

    text: str
    category: str = DEFAULT_CATEGORY
    question_id: int | str = 0
    reference: str | None = None
    history: tuple[Message, ...] = ()
    source: str = ""
    later: tuple[str, ...] = ()

    @property
    def full_text(self) -> str:
        """The whole prompt as text, without roles."""
        return plain_text(self.text, self.history)


def plain_text(text: str, history: Sequence[Message] = ()) -> str:
    """A prompt without roles: all messages, with blank lines between them."""
    return "\n\n".join([*(message.content for message in history), text])


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
        yield Row(f"{named.place}, row {number}", number, fields)


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
    left_out: list[str] = []
    used, named = False, dataset_named(path)
    for row in _file_rows(Path(path)) if named is None else _dataset_rows(named):
        with explained(row.place, ValueError):
            if not isinstance(row.fields, dict):
                raise ValueError("must be a JSON object, such as {'prompt': '...'}")
            try:
                parsed = parse(row)
            except LeftOut as error:
                left_out.append(f"{row.place}: {error}")
                continue
        used = True
        yield parsed
    if left_out and not used:
        raise ValueError(left_out[0])
    log_left_out(left_out)


def log_left_out(rows: Sequence[str]) -> None:
    """Warn of rows that are left out; each says where it is, and why."""
    if rows:
        logger.warning("rows that are left out: %d; the first: %s", len(rows), rows[0])


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
            yield Row(f"{path}, row {number}", number, fields)
    except pyarrow.ArrowException as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from error


def example(row: Row) -> Prompt:
    """The prompt and the answer of a row."""
    given = {name: value for name, value in row.fields.items() if value is not None}
    name = next((name for name in PROMPT_FIELDS if name in given), None)
    if name is None:
        raise ValueError(
            f"needs one of the fields {', '.join(PROMPT_FIELDS)}; it has "
            f"{', '.join(map(str, given)) or 'none'}"
        )
    messages, answer = _prompt(name, given), ""
    if name not in CHATS or messages[-1].role != "assistant":
        messages += _answer(given)
    if messages[-1].role == "assistant":
        answer = messages.pop().content
    if not messages or messages[-1].role != "user":
        role = messages[-1].role if messages else "assistant"
        kind = LeftOut if role in OF_TOOLS or (messages and messages[-1].given) else ValueError
        raise kind(f"{name!r}: the last message must be the user's, it is the {role}'s")
    *history, last = messages
    if not last.content.strip():
        raise ValueError(f"{name!r}: the user's last message is empty")
    category = str(given.get("category") or DEFAULT_CATEGORY)
    if category == ALL:
        raise ValueError(f"'category' must not be {ALL!r}, which is the name of the overall row")
    reference = answer if answer.strip() else None
    question_id = given.get("question_id", row.number)
    turns = given["turns"][1:] if name == "turns" else ()
    later = tuple(_text(name, one) for one in turns)
    return Prompt(last.content, category, question_id, reference, tuple(history), later=later)


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
    if isinstance(content, list):
        parts: list[Any] = [
            part.get("text") if isinstance(part, dict) else part for part in content
        ]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if role in OF_TOOLS or given.get("tool_calls"):
        text = content if isinstance(content, str) else ""
        return Message(ROLES.get(role, role), text, {**given, "role": ROLES.get(role, role)})
    if not isinstance(content, str):
        raise ValueError(f"{what} must hold text, or a list of parts that are all text")
    return Message(ROLES[role], content)
