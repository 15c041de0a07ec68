"""Rollouts of reinforcement learning, drafted by the answers to the same prompts an epoch before.

A policy moves little in an epoch, so most of an answer would be sampled again with the same random
numbers. An answer is kept with the seed of its numbers; the next rollout draws them again and
verifies the old tokens by ``match``, in as few forwards as hold them. SPEC-RL (Liu et al., 2025,
arXiv 2509.23232) also verifies old answers, by probabilities: it accepts more tokens, but samples
from the new policy after a rejection, where the exact distribution (that of the residual) needs all
old probabilities there. With shared numbers each token depends on the new policy and its numbers
alone, so that the distribution is that of plain sampling.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from array import array
from collections.abc import Hashable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from hf_spec.core.checks import MAX_HISTORY, check_count, check_range, first_line
from hf_spec.core.shapes import Row
from hf_spec.files import replacing
from hf_spec.modeling_patches.weights import is_plain, vocabulary, weights_version
from hf_spec.target.noise import SamplingNoise
from hf_spec.threads import RUNNING, locked

#: Tokens of a forward, of each row, which are all as wide as the widest, and of the batch: logits
#: and random numbers of the whole vocabulary are held for each.
OF_A_ROW, OF_A_BATCH = 16, 512
#: Least share of the unfinished rows that have old tokens to verify. The others are padded, and
#: will take as many steps as these rows would.
SHARE = 3 / 4
#: Answers of a lenience above are as good as copied.
MAX_LENIENCE = 1000.0


#: A row for each answer. ``round``: number of the weights that gave it; ``seen`` grows with every
#: answer to the same prompt; ``tokens``: int32.
SCHEMA = """
create table if not exists answers (
    id integer primary key,
    prompt blob not null check (typeof(prompt) = 'blob'),
    seed integer not null check (typeof(seed) = 'integer'),
    round integer not null,
    seen integer not null,
    tokens blob not null check (typeof(tokens) = 'blob' and length(tokens) % 4 = 0)
);
create index if not exists by_prompt on answers (prompt);
create index if not exists by_seen on answers (seen);
"""
#: Number of tokens of the answers that are selected.
_SIZE = "coalesce(sum(length(tokens)), 0) / 4"
#: Finds an answer in a file that others have made.
_STRANGE = """
select id from answers where typeof(prompt) != 'blob' or typeof(seed) != 'integer'
or typeof(seen) != 'integer' or typeof(tokens) != 'blob' or length(tokens) % 4 != 0
or max(id, seen) > 1 << 60 limit 1
"""
#: Files that forked processes leave to their parents.
_OF_PARENTS: list[sqlite3.Connection] = []

logger = logging.getLogger(__name__)


@dataclass
class _Answer:
    """An answer: its tokens, its seed, and the row that holds it; None: none does."""

    tokens: array[int]
    seed: int
    id: int | None = None

    def within(self, vocabulary: int) -> _Answer:
        """The answer up to the first token that a model of so many does not have."""
        known = takewhile(lambda token: 0 <= token < vocabulary, self.tokens)
        return replace(self, tokens=array("i", known))


@dataclass(eq=False)
class RolloutHistory:
    """Answers of earlier rollouts, which draft later ones to the same prompts: the option
    ``history`` of any strategy, ``assistant_kwargs={"history": history}``.

    An answer is used once, when trained weights have changed since; of several answers to a prompt
    each drafts another one. Rollouts that sample draw the numbers of the answer that drafts them
    again. So rollouts of a prompt in different epochs are correlated, as far as the policy stays
    the same.

    Args:
        max_tokens: tokens of answers that are kept, of 4 bytes each; those of the prompts that were
            not seen for longest are dropped.
        fresh: share of rollouts that draw new numbers, against this correlation.
        lenience: how many times as likely a token of the earlier answer is made where it is
            verified, in rollouts that sample. Above 1 more of it is kept, but the answer is not
            sampled from the current policy: **lossy** (the idea is SPEC-RL's).
        path: the SQLite file, of this process alone, that holds the answers instead of the memory;
            with those that an earlier process has left there.

    Raises:
        ValueError: if the file is in use, or is no history's.
    """

    max_tokens: int = MAX_HISTORY
    fresh: float = 0.0
    lenience: float = 1.0
    path: str | Path | None = None

    def __post_init__(self) -> None:
        check_count("max_tokens", self.max_tokens)
        check_range("fresh", self.fresh, 0.0, 1.0)
        check_range("lenience", self.lenience, 1.0, MAX_LENIENCE)
        self._round, self._last, self._warned = 0, 0, False
        #: Of each model, the key of its weights, and their number, which no others have.
        self._weights: WeakKeyDictionary[nn.Module, tuple[Hashable, int]] = WeakKeyDictionary()
        #: Of the calls that run.
        self._taken: WeakSet[Earlier] = WeakSet()
        #: Answers that were used, and that the file would not let go.
        self._used: set[int] = set()
        try:
            self._open(self.path)
            with self._rows as rows:
                rows.execute("update answers set round = -1")
        except sqlite3.Error as error:
            raise ValueError(
                f"path={str(self.path)!r}: must be a new file, or a history's that is not in use: "
                f"{error}"
            ) from error

    def to_dict(self) -> None:
        """None, as which a ``GenerationConfig`` prints and saves it: whoever reads the file has no
        answers."""

    def __deepcopy__(self, memo: Any) -> RolloutHistory:
        return self  # generate() copies its configuration

    def __reduce__(self) -> Any:  # trainers pickle their arguments; :meth:`save` keeps answers
        return type(self), (self.max_tokens, self.fresh, self.lenience)

    def _open(self, path: str | Path | None) -> None:
        self._process = os.getpid()
        # Threads take turns by `locked`.
        self._file = sqlite3.connect(path or ":memory:", timeout=0, check_same_thread=False)
        self._file.execute("pragma locking_mode = exclusive")
        self._file.executescript(SCHEMA)
        if self._file.execute(_STRANGE).fetchone():
            raise sqlite3.DataError("its answers are not as a history writes them")
        self._count()

    @property
    def _rows(self) -> sqlite3.Connection:
        if self.path is not None and self._process != os.getpid():
            _OF_PARENTS.append(self._file)  # closed here, it would take the parent's journal away
            self._warn("they are in a file of the process that this one was forked from")
            self._open(None)
        return self._file

    def _warn(self, why: str) -> None:
        """Say once that answers will not draft."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "%r: answers cannot be kept or read (%s), so they draft no later rollouts. Nothing "
                "else is lost.", self, why,
            )  # fmt: skip

    def _count(self) -> None:
        """Find the number of tokens, and the last number that an answer has."""
        count = f"select {_SIZE}, coalesce(max(max(seen, id)), 0) from answers"
        self._size, last = self._file.execute(count).fetchone()
        self._last = max(self._last, last)

    def begin(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device
    ) -> Earlier:
        """The earlier answers for a call with these prompts, whose random numbers are drawn on a
        device. No other call is given them as long as the result exists."""
        keys = [blake2b(array("i", prompt), digest_size=16).digest() for prompt in prompts]
        with RUNNING:
            seeds = torch.randint(2**48, (len(keys),), device=device).tolist()
            fresh = (torch.rand(len(keys), device=device) < self.fresh).tolist()
        return self._take(model, keys, seeds, fresh, list(map(len, prompts)))

    @locked
    def _take(
        self, model: nn.Module, keys: list[bytes], seeds: list[int], fresh: list[bool],
        prompts: list[int],
    ) -> Earlier:  # fmt: skip
        round = self._number_of_weights(model)
        try:
            left = {key: self._answers(key, round) for key in dict.fromkeys(keys)}
        except sqlite3.Error as error:
            self._warn(first_line(error))
            left = {key: [] for key in keys}
        old = [left[key].pop(0) if left[key] else None for key in keys]
        known = vocabulary(model)
        drafts = [
            _Answer(array("i"), seed) if one is None or new else one.within(known)
            for one, seed, new in zip(old, seeds, fresh)
        ]
        earlier = Earlier(self, keys, old, drafts, prompts, round)
        self._taken.add(earlier)
        return earlier

    def _number_of_weights(self, model: nn.Module) -> int:
        trained = (x for x in model.parameters() if x.requires_grad)
        weights = weights_version([x for x in trained if is_plain(x)])
        if self._weights.get(model, (None, 0))[0] != weights:
            self._round += 1
            self._weights[model] = weights, self._round
        return self._weights[model][1]

    def _answers(self, key: bytes, round: int) -> list[_Answer]:
        """Those to a prompt that other weights gave, and no call has, the oldest first."""
        taken = {one.id for call in self._taken for one in call.old if one is not None}
        taken |= self._used
        rows = self._rows.execute(
            "select tokens, seed, id from answers where prompt = ? and round != ? order by id",
            (key, round),
        )
        found = (_Answer(array("i", tokens), *rest) for tokens, *rest in rows)
        return [one for one in found if one.id not in taken]

    @locked
    def add(self, earlier: Earlier, answers: Sequence[Sequence[int]]) -> None:
        """Keep the answers of a call, in place of those that drafted them, if there is room."""
        used = [one.id for one in earlier.old if one is not None and one.id is not None]
        try:
            with self._rows as rows:
                size = self._size - self._drop([("id", id) for id in used])
                for key, draft, answer in zip(earlier.keys, earlier.drafts, answers):
                    self._insert([(key, draft.seed, array("i", answer).tobytes())], earlier.round)
                    rows.execute("update answers set seen = ? where prompt = ?", (self._last, key))
                    size += len(answer)
                while size > self.max_tokens:
                    oldest = rows.execute("select prompt from answers order by seen limit 1")
                    size -= self._drop([("prompt", oldest.fetchone()[0])])
            self._size = size  # not before it is written
        except (sqlite3.Error, MemoryError) as error:
            self._used.update(used)
            self._warn(first_line(error))

    def _is_own(self, path: str | Path) -> bool:
        """Whether this is the file that holds the answers."""
        return self.path is not None and Path(path).resolve() == Path(self.path).resolve()

    def _drop(self, which: Iterable[tuple[str, Any]]) -> int:
        """Drop answers by values of columns; returns the number of their tokens."""
        size = 0
        for column, value in which:
            count = f"select {_SIZE} from answers where {column} = ?"
            size += self._rows.execute(count, (value,)).fetchone()[0]
            self._rows.execute(f"delete from answers where {column} = ?", (value,))
        return size

    def _insert(self, answers: Iterable[tuple[bytes, int, bytes]], round: int = -1) -> None:
        """Add prompts, seeds and tokens, under numbers that no answer has had before."""
        for answer in answers:
            self._last += 1
            values = (self._last, *answer, round, self._last)
            columns = "id, prompt, seed, tokens, round, seen"
            self._rows.execute(f"insert into answers ({columns}) values (?, ?, ?, ?, ?, ?)", values)

    @locked
    def save(self, path: str | Path) -> None:
        """Write the answers to an SQLite file, in one step; :meth:`load` takes them. In the file
        that holds them, :attr:`path`, they are already."""
        if self._is_own(path):
            return  # what takes its place would not get later answers
        with replacing(Path(path)) as temporary, closing(sqlite3.connect(temporary)) as file:
            self._rows.backup(file)

    @locked
    def load(self, path: str | Path) -> None:
        """Take the answers of a file in place of those that are there.

        Raises:
            ValueError: if it is no file that :meth:`save` has written.
        """
        if self._is_own(path):
            return
        place = f"{Path(path).absolute().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(place, uri=True)) as file, self._rows as rows:
                rows.execute("delete from answers")
                select = "select prompt, seed, tokens from answers order by seen, id"
                self._insert(file.execute(select))
        except sqlite3.Error as error:
            raise ValueError(
                f"{str(path)!r} holds no answers as RolloutHistory.save() writes them: {error!r}"
            ) from error
        finally:
            self._count()


@dataclass(eq=False)
class Earlier:
    """The earlier answers that draft a call.

    Attributes:
        history: where they are kept.
        keys: of each sequence's prompt.
        old: the answer that each sequence replaces; None if it replaces none.
        drafts: what drafts each sequence; it has no tokens if nothing does.
        prompts: number of tokens of each prompt.
        round: number of the weights.
    """

    history: RolloutHistory
    keys: list[bytes]
    old: list[_Answer | None]
    drafts: list[_Answer]
    prompts: list[int]
    round: int

    @property
    def seeds(self) -> list[int]:
        """Of each sequence's random numbers."""
        return [one.seed for one in self.drafts]

    def __post_init__(self) -> None:
        self._left: list[Sequence[int]] = [one.tokens for one in self.drafts]

    def rows(
        self, sequences: Sequence[int], tokens_of: Sequence[list[int]], active: Sequence[bool],
        noise: SamplingNoise | None,
    ) -> list[Row] | None:  # fmt: skip
        """Chains of the tokens that follow in the earlier answers, as far as these were sampled
        again; None if too few rows have any.

        Args:
            sequences: number of each row's sequence.
            tokens_of: its tokens so far, with the prompt.
            active: whether it is unfinished.
            noise: what the next tokens will be sampled with.
        """
        rows, following = [], []
        most = max(min(OF_A_ROW, OF_A_BATCH // len(sequences)) - 1, 1)
        for sequence, tokens, unfinished in zip(sequences, tokens_of, active):
            emitted = tokens[self.prompts[sequence] :]
            if not unfinished or emitted != [*self._left[sequence][: len(emitted)]]:
                self._left[sequence] = ()
            following.append(self._left[sequence][len(emitted) :][: most + 1])
            drafted = following[-1][:most]
            size = len(drafted) + 1
            rows.append(Row([*range(-1, size - 1)], [tokens[-1], *drafted], [1.0] * size))
        verified = sum(len(row.tokens) > 1 for row in rows)
        enough = verified >= max(SHARE * sum(active), 1)
        if noise is not None and self.history.lenience > 1:
            favored = following if enough else [()] * len(rows)
            noise.favor(favored, self.history.lenience)
        return rows if enough else None
