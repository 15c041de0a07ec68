"""Reads files of prompts and answers as people have them; all commands read with this module.

A file holds JSON lines or a JSON array of objects, either may be gzipped, in UTF-8 or, with a byte
order mark, UTF-16 (lines in Windows-1252 are read with a warning); or it is a parquet file. What it
holds is seen from its content, not its name.
A row is one of:

- a chat: ``messages`` (OpenAI, TRL), or ``conversations`` (ShareGPT). Its last message is the
  answer if it is the assistant's; what comes before is the prompt.
- a text: ``turns`` (Spec-Bench; the first is taken), ``prompt`` or ``question``; or ``instruction``
  with ``input`` or ``context`` (Alpaca, Dolly). `ANSWER_FIELDS` may hold the answer. ``prompt``
  and ``completion`` may be lists of messages (TRL).

The first of `PROMPT_FIELDS` that a row has is taken. A field that is null counts as missing.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

DEFAULT_CATEGORY = "default"
#: Fields that may hold the prompt, in order of preference; of chats, with the answer.
PROMPT_FIELDS = ("messages", "conversations", "turns", "prompt", "question", "instruction")
CHATS = ("messages", "conversations")
#: Fields that may hold the answer, in order of preference; of a list of texts, the first is taken.
ANSWER_FIELDS = ("answer", "completion", "output", "response", "reference")
#: What an ``instruction`` is about.
INPUT_FIELDS = ("input", "context")
#: Fields whose rows may have a system prompt beside them, in ``system``.
WITH_SYSTEM = ("conversations", "instruction")
#: Roles of a chat template by the names that files have for them.
ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "human": "user",
    "gpt": "assistant",
}  # fmt: skip
ACCEPTED = (
    "a file holds JSON lines, a JSON array of objects (both may be gzipped) or parquet; "
    "datasets.load_dataset('csv', data_files=FILE)['train'].to_json('FILE.jsonl') converts others"
)
PARQUET, GZIP, UTF_16 = b"PAR1", b"\x1f\x8b", (b"\xff\xfe", b"\xfe\xff")
#: Rows of a parquet file that are in memory at once.
BATCH = 1000
#: JSON can escape half of a pair of surrogates, which is no character and has no UTF-8.
SURROGATE = re.compile("[\ud800-\udfff]")

T = TypeVar("T")

logger = logging.getLogger(__name__)
#: Files of which it has been said that they are not UTF-8.
_warned: set[str] = set()


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        place: where it is, for errors.
        number: its line in a file of JSON lines, else its position, both from 1.
        fields: its content.
    """

    place: str
    number: int
    fields: dict[str, Any]


class Message(NamedTuple):
    """A message of a chat; ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """A prompt, with its answer if the file has one.

    Attributes:
        text: the prompt as text, without a chat template; of a chat, what the user says last.
        category: its category; results are reported for each.
        question_id: its id; the number of its row if the file gives none.
        reference: the answer; None if there is none.
        history: the messages of a chat before ``text``.
    """

    text: str
    category: str = DEFAULT_CATEGORY
    question_id: int | str = 0
    reference: str | None = None
    history: tuple[Message, ...] = ()

    @property
    def full_text(self) -> str:
        """The whole prompt as text, without roles."""
        return plain_text(self.text, self.history)


def plain_text(text: str, history: Sequence[Message] = ()) -> str:
    """A prompt without roles: all messages, with blank lines between them."""
    return "\n\n".join([*(message.content for message in history), text])


# -- files ---------------------------------------------------------------------------------------


def read(path: str | Path, parse: Callable[[Row], T]) -> Iterator[T]:
    """What ``parse`` makes of each row; the place is put before its errors.

    Raises:
        ValueError: as :func:`read_rows`, or by ``parse``.
    """
    for row in read_rows(path):
        try:
            made = parse(row)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from error
        yield made


def read_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a file, none if it is empty. A JSON array is read as a whole, others in parts.

    Raises:
        ValueError: the file cannot be read, or it is not what the module's text says; the message
            names the place.
        ImportError: it is a parquet file, and pyarrow is not installed.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"cannot read {str(path)!r}: it is a folder; give a file in it")
    try:
        with path.open("rb") as file:
            start = file.peek(len(PARQUET))
            if start.startswith(PARQUET):
                yield from _parquet_rows(path)
            else:
                packed = start.startswith(GZIP)
                yield from _json_rows(path, gzip.GzipFile(fileobj=file) if packed else file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"cannot read {str(path)!r}: the gzip file is cut off or damaged ({error}); get it "
            "again"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def _json_rows(path: Path, file: io.BufferedReader | gzip.GzipFile) -> Iterator[Row]:
    lines = _lines(path, file)
    begun = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not begun and line.lstrip().startswith("["):
            # Blank lines in place of those before, so that errors name the right one.
            whole = "\n" * (number - 1) + line + "".join(lines)
            for position, found in enumerate(_parsed(whole, str(path)), start=1):
                place = f"{path}, row {position}"
                yield Row(place, position, _as_object(found, place))
            return
        place = f"{path}, line {number}"
        yield Row(place, number, _as_object(_parsed(line, place, begun), place))
        begun = True


def _lines(path: Path, file: io.BufferedReader | gzip.GzipFile) -> Iterator[str]:
    """Lines as text. They end at line feeds only: JSON texts may hold what else ends lines."""
    if file.peek(2)[:2] in UTF_16:
        try:
            yield from io.StringIO(file.read().decode("utf-16"), newline="\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: begins like UTF-16, but byte {error.start + 1} is not ({error.reason}): "
                "save the file as UTF-8"
            ) from error
        return
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            yield _from_windows(line, f"{path}, line {number}", error)


def _from_windows(line: bytes, place: str, error: UnicodeDecodeError) -> str:
    """A line that is not UTF-8, read as what older programs on Windows write, with a warning."""
    found = f"{place}: byte {error.start + 1} of the line is {line[error.start]:#04x}, not UTF-8"
    try:
        text = line.decode("cp1252")
    except UnicodeDecodeError:
        raise ValueError(f"{found}; save the file as UTF-8") from error
    file = place.rpartition(",")[0]
    if file not in _warned:
        _warned.add(file)
        logger.warning(
            "%s: read as Windows-1252; if characters come out wrong, save the file as UTF-8", found
        )
    return text


def _parsed(text: str, place: str, begun: bool = False) -> Any:
    """Parsed JSON; ``begun`` is whether there was a row before."""
    try:
        return json.loads(text)
    except ValueError as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            line = f"line {error.lineno}, " if "\n" in text.rstrip() else ""
            reason = f"{error.msg} at {line}column {error.colno}"
        hint = "" if begun else f": {ACCEPTED}"
        raise ValueError(f"{place}: not JSON ({reason}){hint}") from error


def _as_object(found: Any, place: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{place}: must be a JSON object, such as {{'prompt': '...'}}")
    return found


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(
            f"{str(path)!r} is a parquet file, which needs pyarrow; run: "
            "pip install 'hf_spec[train]'"
        ) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=BATCH):
            for fields in batch.to_pylist():
                number += 1
                yield Row(f"{path}, row {number}", number, fields)
    except pyarrow.ArrowException as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from error


# -- rows ----------------------------------------------------------------------------------------


def example(fields: Mapping[str, Any]) -> Prompt:
    """The prompt and the answer of a row; category and id are left to the reader.

    Raises:
        ValueError: the row has no prompt, or a field does not hold what it must.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    name = next((name for name in PROMPT_FIELDS if name in given), None)
    if name is None:
        raise ValueError(
            f"needs one of the fields {', '.join(PROMPT_FIELDS)}; it has "
            f"{', '.join(map(str, given)) or 'none'}"
        )
    messages, answer = _prompt(name, given), None
    if name not in CHATS or messages[-1].role != "assistant":
        more, answer = _answer(given)
        messages += more
    if answer is None and messages[-1].role == "assistant":
        answer = messages.pop().content
    if not messages or messages[-1].role != "user":
        role = messages[-1].role if messages else "assistant"
        raise ValueError(f"{name!r}: the last message must be the user's, it is the {role}'s")
    *history, last = messages
    if not last.content.strip():
        raise ValueError(f"{name!r}: the user's last message is empty")
    reference = answer if answer and answer.strip() else None
    return Prompt(last.content, reference=reference, history=tuple(history))


def checked_text(name: str, value: Any) -> str:
    """``value``, a text.

    Raises:
        ValueError: it is none, is empty, or has half a pair of surrogates.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name!r} must hold a text that is not empty")
    return _whole(repr(name), value)


def _whole(what: str, text: str) -> str:
    half = SURROGATE.search(text)
    if half:
        raise ValueError(
            f"{what} has \\u{ord(half[0]):04x}, half of a surrogate pair, which is no character: "
            "write both halves, or leave it out"
        )
    return text


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
        text = checked_text(name, value)
        about = [given[field] for field in INPUT_FIELDS if given.get(field)]
        if name == "instruction" and about:
            text = plain_text(checked_text("input", about[0]), [Message("user", text)])
        messages = [Message("user", text)]
    system = given.get("system") if name in WITH_SYSTEM else None
    return [Message("system", checked_text("system", system)), *messages] if system else messages


def _answer(given: Mapping[str, Any]) -> tuple[list[Message], str | None]:
    """What follows the prompt, as messages or as text."""
    for name in ANSWER_FIELDS:
        found = given.get(name)
        if isinstance(found, list) and found:
            if name == "completion" and isinstance(found[0], dict):
                return _messages(name, found), None
            found = found[0]
        if isinstance(found, str) and found.strip():
            return [], _whole(repr(name), found)
    return [], None


def _messages(name: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} must be a list of messages that is not empty")
    return [_message(f"message {i} of {name!r}", one) for i, one in enumerate(value, start=1)]


def _message(what: str, given: Any) -> Message:
    if not isinstance(given, dict):
        raise ValueError(f"{what} must be an object with role and content, or from and value")
    role, content = (
        next((given[key] for key in keys if given.get(key) is not None), None)
        for keys in (("role", "from"), ("content", "value"))
    )
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{what} has the role {role!r}; it must be one of {', '.join(ROLES)}")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise ValueError(f"{what} must hold text, or a list of parts that are all text")
    return Message(ROLES[role], _whole(what, content))
