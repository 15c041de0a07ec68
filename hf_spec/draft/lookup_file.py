"""Answers that lookups search and that last: an SQLite file, and an index of all its tokens.

Several processes may use a file at once. Each connects to it for a moment only, once per call: no
connection outlives a call, a fork or the process. What a process has not seen of the others'
answers comes with its own next one.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from hf_spec.core.checks import first_line
from hf_spec.draft.lookup import END, HISTORY_NGRAM, History, Limits, Match
from hf_spec.threads import locked, recall

#: Most tokens of a file; the oldest answers are dropped. The index takes 48 bytes for each.
MOST_TOKENS = 2**22
#: New tokens that are searched by themselves, before they enter the index.
FEW = 2**15
#: Seconds for which a process waits while another one writes.
PATIENCE = 1.0
#: ``application_id`` and ``user_version`` of our files.
OURS, VERSION = 0x68667370, 1
#: Facts of a config that tell tokenizers apart.
FACTS = ("model_type", "vocab_size", "bos_token_id")
#: ``tokens``: int32, without an `END`; ``digest``: theirs, as the same answer counts once.
SCHEMA = f"""
pragma application_id = {OURS};
pragma user_version = {VERSION};
create table facts (name text primary key, value text not null);
create table answers (
    id integer primary key autoincrement,
    digest blob not null unique,
    tokens blob not null check (typeof(tokens) = 'blob' and length(tokens) % 4 = 0)
);
"""

logger = logging.getLogger(__name__)


def tokenizer_facts(config: Any) -> dict[str, Any]:
    """What a model's config says of its tokenizer."""
    text = config.get_text_config(decoder=True)
    return {name: getattr(text, name, None) for name in FACTS}


class AnswerFile:
    """An SQLite file of answers.

    Args:
        path: of the file, which is made if there is none.
        facts: those of the model (:func:`tokenizer_facts`), which the file must have, too.
        fixed: whether no answers of calls are added to the file from now on; those of processes
            that have opened it before are.

    Attributes:
        fixed: whether the file says so, or cannot be written.
        size: tokens that were given, without those that were dropped.

    Raises:
        ValueError: if it is no such file, or is one of another tokenizer.
    """

    def __init__(self, path: str | Path, facts: dict[str, Any], fixed: bool = False):
        self.path, self._seen, self.size = Path(path).absolute(), 0, 0
        if self.path.is_dir() or not self.path.parent.is_dir():
            why = "is a folder" if self.path.is_dir() else "is in a folder that does not exist"
            raise ValueError(f"{str(path)!r} {why}: give a file, in a folder that there is.")
        written = os.access(self.path, os.W_OK) or not self.path.exists()
        self._mode = "rwc" if written else "ro"
        try:
            with self._open() as rows:
                known = self._known(rows, facts)
                other = [name for name in facts if known.get(name) != facts[name]]
                if fixed and not other:
                    rows.execute("insert or replace into facts values ('fixed', 'true')")
                    known["fixed"] = True
        except sqlite3.Error as error:
            raise ValueError(
                f"{str(path)!r} must be a new file, or one of earlier answers for lookups: "
                f"{first_line(error)}"
            ) from error
        self.fixed = bool(known.get("fixed", False)) or not written
        if other:
            differ = ", ".join(f"{name} {known.get(name)!r}, not {facts[name]!r}" for name in other)
            raise ValueError(
                f"{str(path)!r} holds the tokens of another tokenizer ({differ}): give a file of "
                "its own to each."
            )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A transaction, in which nobody else writes."""
        place, before = f"{self.path.as_uri()}?mode={self._mode}", (self._seen, self.size)
        rows = sqlite3.connect(place, PATIENCE, isolation_level=None, uri=True)
        try:
            # A call does not wait for the disk: only a loss of power may damage the file.
            rows.execute("pragma synchronous = off")
            rows.execute("begin" if self._mode == "ro" else "begin immediate")
            yield rows
            rows.execute("commit")
        except BaseException:  # other answers will get these numbers
            self._seen, self.size = before
            raise
        finally:
            rows.close()

    def _known(self, rows: sqlite3.Connection, facts: dict[str, Any]) -> dict[str, Any]:
        """The facts of the file, which are given to a new one."""
        if not rows.execute("select 1 from sqlite_master").fetchone():
            for statement in filter(str.strip, SCHEMA.split(";\n")):
                rows.execute(statement)
            given = [(name, json.dumps(value)) for name, value in facts.items()]
            rows.executemany("insert into facts values (?, ?)", given)
        (ours,), (version,) = (
            rows.execute(f"pragma {name}").fetchone() for name in ("application_id", "user_version")
        )
        if (ours, version) != (OURS, VERSION):
            raise sqlite3.DataError("it holds something else")
        try:
            return {name: json.loads(value) for name, value in rows.execute("select * from facts")}
        except ValueError as error:
            raise sqlite3.DataError(f"its facts are broken: {error}") from error

    def unseen(self) -> array[int]:
        """The answers that this object has not given yet, an `END` behind each."""
        try:
            with self._open() as rows:
                return self._unseen(rows)
        except sqlite3.Error as error:
            raise ValueError(f"{str(self.path)!r} is damaged: {first_line(error)}") from error

    def _unseen(self, rows: sqlite3.Connection) -> array[int]:
        found = array("i")
        query = "select id, tokens from answers where id > ? order by id"
        for number, tokens in rows.execute(query, (self._seen,)):
            if not isinstance(tokens, bytes) or len(tokens) % found.itemsize:
                raise sqlite3.DataError(f"answer {number} holds no tokens")
            found.frombytes(tokens)
            found.append(END)
            self._seen = number
            self.size += len(tokens) // found.itemsize
        return found

    def num_new(self, answers: Iterable[Sequence[int]]) -> int:
        """How many different answers there are among these that the file has not."""
        digests = {digest for digest, _ in _rows_of(answers)}
        known, query = 0, "select count(*) from answers where digest = ?"
        with self._open() as rows:
            for digest in digests:
                known += rows.execute(query, (digest,)).fetchone()[0]
        return len(digests) - known

    def add(self, answers: Iterable[Sequence[int]]) -> array[int]:
        """Keep these answers, all or none; returns :meth:`unseen`, with them. An ``sqlite3.Error``
        if they cannot be written."""
        given = _rows_of(answers)
        with self._open() as rows:
            # A repeated answer is the latest one again.
            insert = "insert or replace into answers (digest, tokens) values (?, ?)"
            rows.executemany(insert, given)
            found = self._unseen(rows)
            while self.size > MOST_TOKENS:
                self._drop(rows)
        return found

    def _drop(self, rows: sqlite3.Connection) -> None:
        """Drop the oldest eighth of the answers."""
        first, last = rows.execute("select min(id), max(id) from answers").fetchone()
        rows.execute("delete from answers where id <= ?", (first + (last - first) // 8,))
        size = rows.execute("select coalesce(sum(length(tokens)), 0) / 4 from answers")
        self.size = size.fetchone()[0]


def _rows_of(answers: Iterable[Sequence[int]]) -> list[tuple[bytes, bytes]]:
    """Digest and tokens of each answer that has some."""
    new = (array("i", answer).tobytes() for answer in answers)
    return [(blake2b(one, digest_size=16).digest(), one) for one in new if one]


class Corpus:
    """Index of many token sequences, an `END` behind each: by n-gram size, sorted hashes, and where
    the n-grams end; among equal ones the latest is last.

    Attributes:
        tokens: all of them.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        nothing = np.empty(0, np.uint64), np.empty(0, np.int32)
        self._index = dict.fromkeys(range(1, HISTORY_NGRAM + 1), nothing)

    def with_more(self, tokens: array[int]) -> Corpus:
        """One with further sequences."""
        new, start = Corpus(), len(self.tokens)
        new.tokens = self.tokens + tokens
        ids = np.array(tokens, np.int32)
        for size, (keys, ends) in self._index.items():
            more, within = _hashes(ids, size)
            order = within[np.argsort(more[within], kind="stable")]
            more, places = more[order], (order + start + size).astype(np.int32)
            at = keys.searchsorted(more, "right")
            new._index[size] = np.insert(keys, at, more), np.insert(ends, at, places)
        return new

    def matches(self, tokens: Sequence[int], limit: int, sizes: Iterable[int]) -> list[Match]:
        """Occurrences of a sequence's end; see :meth:`NgramIndex.matches`."""
        found: list[Match] = []
        seen: set[int] = set()
        for size in sizes:
            if size > len(tokens):
                continue
            keys, ends = self._index[size]
            key = np.uint64(_hash(tokens[-size:]))
            low, high = int(keys.searchsorted(key)), int(keys.searchsorted(key, "right"))
            for end in ends[max(low, high - limit - len(seen)) : high][::-1].tolist():
                if end not in seen:
                    seen.add(end)
                    found.append(Match(end, size, self.tokens))
                    if len(found) == limit:
                        return found
        return found


#: Multiplier and shift of the hashes.
_FACTOR, _SHIFT, _MASK = 0x9E3779B97F4A7C15, 31, 2**64 - 1


def _hash(ngram: Sequence[int]) -> int:
    """64 bits; an n-gram that another one collides with has a draft that is not accepted."""
    found = len(ngram)
    for token in ngram:
        found = ((found ^ (token & _MASK)) * _FACTOR) & _MASK
        found ^= found >> _SHIFT
    return found


def _hashes(ids: Any, size: int) -> tuple[Any, Any]:
    """:func:`_hash` of each n-gram of a sequence, and the indices of those without an `END`."""
    count, numbers = max(len(ids) - size + 1, 0), ids.astype(np.uint64)
    found, within = np.full(count, size, np.uint64), np.ones(count, bool)
    for place in range(size):
        found = (found ^ numbers[place : place + count]) * np.uint64(_FACTOR)
        found ^= found >> np.uint64(_SHIFT)
        within &= ids[place : place + count] != END
    return found, within.nonzero()[0]


class LastingHistory(History):
    """The answers in a file, and those of calls, which the file keeps unless it is fixed.

    Args:
        path: see :class:`AnswerFile`.
        config: that of the model.
    """

    def __init__(self, path: str | Path, config: Any):
        super().__init__(FEW)
        self._path, self._facts, self._warned = path, tokenizer_facts(config), False
        self._load()

    def _load(self) -> None:
        """Index all answers of the file."""
        file = AnswerFile(self._path, self._facts)
        corpus = Corpus().with_more(file.unseen())
        self._file, self._corpus, self._parts = file, corpus, self._nothing()

    def matches(self, tokens: Sequence[int], limits: Limits) -> list[Match]:
        sizes = range(min(limits.max_ngram, HISTORY_NGRAM), limits.min_ngram - 1, -1)
        found = super().matches(tokens, limits)
        found += self._corpus.matches(tokens, limits.max_matches, sizes)
        return sorted(found, key=lambda match: -match.size)[: limits.max_matches]

    @locked
    def add(self, answers: Iterable[Sequence[int]]) -> None:
        """Keep these token sequences, here and in the file."""
        if self._file.fixed:
            return
        try:
            new = self._file.add(answers)
        except sqlite3.Error as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "answers cannot be kept in %s (%s), so later lookups do not find them. Nothing "
                    "else is lost.", self._file.path, first_line(error),
                )  # fmt: skip
            return
        known, _ = self._parts
        if len(known) + len(new) <= FEW:
            super().add(_sequences(new))
            return
        self._corpus = self._corpus.with_more(array("i", known) + new)
        self._parts = self._nothing()
        if len(self._corpus.tokens) > 2 * MOST_TOKENS:  # half of which the file has dropped
            self._load()


def history_of(model: Any, where: int | str) -> History | None:
    """The earlier answers that lookups search (option ``lookup_history``), which all calls with a
    model share: so many tokens, or those of a file; None if ``where`` is 0."""
    if not where:
        return None
    if isinstance(where, int):
        return recall(model, (History, where), lambda: History(where))
    place = os.path.abspath(where)
    return recall(model, (History, place), lambda: LastingHistory(place, model.config))


def _sequences(tokens: array[int]) -> Iterator[array[int]]:
    """Token sequences, of which each has an `END` behind it."""
    start = 0
    while start < len(tokens):
        end = tokens.index(END, start)
        yield tokens[start:end]
        start = end + 1
