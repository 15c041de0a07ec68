"""The growing sequences of a call: stopping criteria, streaming, recorded scores, final ids."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from hf_spec.cache.attention import SMALLEST
from hf_spec.core.device import bucket, to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult

#: More tokens than any call emits; sums of a few such numbers fit into int64.
NO_LIMIT = 2**60
#: That of ``torch.multinomial``, by which plain generation samples.
NOT_SAMPLED = "probability tensor contains either `inf`, `nan` or element < 0"
#: Logits and scores ``(..., vocab)`` of a token, None where they are not wanted.
Recorded = tuple[Tensor | None, ...]


class Snapshot(NamedTuple):
    """The batch's rows between two steps.

    Attributes:
        tokens: real tokens of each row, with the prompt.
        active: whether each row still takes tokens.
        remaining: tokens that each row may still emit.
    """

    tokens: list[list[int]]
    active: list[bool]
    remaining: list[int]


class Sequences:
    """The call's sequences. Those still in the batch are its rows; all others have ended.

    Args:
        input_ids: ``(sequences, width)`` the prompt as passed to ``generate``.
        real: ``(sequences, width)`` bool, False for padding; None if there is none.
        criteria: the prepared stopping criteria; one of them is a ``MaxLengthCriteria``.
        pad_token_id: fills sequences past their end.
        streamer: receives the same calls as in plain generation. If it has a method ``end_step``,
            this is called after each step; and so is ``see_step``, with the step's trees.
        shows_scores: whether criteria are given the recorded scores.
        same: makes numbers equal in all processes that decode together.

    Attributes:
        lengths: columns in use of each sequence.
        rows: the sequence of each row of the batch.
        eos: tokens that end a sequence.
        pad: fills sequences past their end.
    """

    def __init__(
        self, input_ids: Tensor, real: Tensor | None, criteria: StoppingCriteriaList,
        pad_token_id: int | None = None, streamer: Any = None, shows_scores: bool = False,
        same: Callable[[Sequence[float]], list[float]] = list,
    ):  # fmt: skip
        count, self.prompt_length = input_ids.shape
        self.max_length = NO_LIMIT
        self._ids = input_ids.clone()
        self.lengths = [self.prompt_length] * count
        #: Columns of each sequence that the device has.
        self._sent = [self.prompt_length] * count
        self.rows = list(range(count))
        self._now: Snapshot | None = None  # until the next step
        prompts = input_ids if real is None else [ids[own] for ids, own in zip(input_ids, real)]
        self._tokens: list[list[int]] = [ids.tolist() for ids in prompts]
        self.streamer, self._streamed = streamer, self.prompt_length
        self.pad = pad_token_id or 0
        #: Length at which a sequence's criteria first stopped it.
        self._stops: list[int | None] = [None] * count
        #: Logits and scores ``(vocab,)`` of each emitted token, if they are recorded.
        self._recorded: list[list[Recorded]] = [[] for _ in self.rows]
        #: Scores of each column that criteria were asked about; None if they are given none.
        self._asked_scores: list[Tensor] | None = [] if shows_scores else None

        # Length, EOS, time and stop strings are checked for each token. Other criteria may look at
        # the whole batch: they are called once all sequences have got as far.
        self.eos: set[int] = set()
        self._deadline, self._same = float("inf"), same
        self._by_token: list[Any] = []
        self._by_column: list[Any] = []
        self._asked = self.prompt_length
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria:
                # Criteria are asked after a token.
                end = max(math.ceil(criterion.max_length), self.prompt_length + 1)
                self.max_length = min(end, self.max_length)
            elif type(criterion) is MaxTimeCriteria:
                end = criterion.initial_timestamp + criterion.max_time
                self._deadline = min(end, self._deadline)
            elif type(criterion) is StopStringCriteria:
                self._by_token.append(criterion)
            else:
                self._by_column.append(criterion)

        # Plain generation pads finished sequences if any criterion knows EOS; otherwise they run on
        # until the last one is done.
        self._pads = count == 1 or any(hasattr(one, "eos_token_id") for one in criteria)

    # -- the rows of the batch ---------------------------------------------------------------

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order; the others have ended."""
        self.rows = [self.rows[row] for row in rows]
        self._now = None

    @property
    def now(self) -> Snapshot:
        """The rows as they are, determined once per step."""
        if self._now is None:
            self._now = Snapshot(
                [self._tokens[row] for row in self.rows], [self._takes(row) for row in self.rows],
                [self.max_length - self.lengths[row] for row in self.rows],
            )  # fmt: skip
        return self._now

    @property
    def emitted(self) -> list[int]:
        """Tokens that each sequence of the call has emitted."""
        return [length - self.prompt_length for length in self.lengths]

    @property
    def answers(self) -> list[list[int]]:
        """The tokens that each sequence of the call has emitted."""
        return [own[len(own) - n :] for own, n in zip(self._tokens, self.emitted)]

    @property
    def prompts(self) -> list[list[int]]:
        """The tokens of each sequence's prompt, without padding."""
        return [own[: len(own) - n] for own, n in zip(self._tokens, self.emitted)]

    # -- growing -----------------------------------------------------------------------------

    @property
    def ids(self) -> Tensor:
        """``(sequences, capacity)`` prompt and emitted tokens, ``lengths[i]`` columns in use; what
        follows is scratch space for draft tokens.

        The host knows what has been emitted, and the device is told when somebody asks."""
        new = [
            (row, column, tokens[column - own])
            for row, (tokens, first, own) in enumerate(zip(self._tokens, self._sent, self.lengths))
            for column in range(first, own)
        ]
        if new:
            self._ids = _reserved(self._ids, max(self.lengths))
            rows, columns, tokens = to_device(new, self._ids.device).unbind(1)
            self._ids[rows, columns] = tokens
        self._sent = list(self.lengths)
        return self._ids

    @property
    def device(self) -> torch.device:
        """Where the ids are."""
        return self._ids.device

    def of_rows(self, first: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids ``(batch, capacity)`` of the batch's rows, with a power of two of columns, and the
        columns ``(2, batch)`` from which on, by sequence, and up to which they matter."""
        lengths = [self.lengths[row] for row in self.rows]
        capacity = max(bucket(max(lengths)), SMALLEST)
        self._ids = _reserved(self._ids, capacity)
        numbers = to_device([self.rows, [first[row] for row in self.rows], lengths], self.device)
        return self.ids[numbers[0], :capacity], numbers[1:]

    def write(self, tokens: Tensor) -> None:
        """Put tokens ``(batch, n)`` into the scratch space of each row."""
        lengths = [self.lengths[row] for row in self.rows]
        self._ids = _reserved(self._ids, max(lengths) + tokens.shape[1])
        rows, columns = to_device([self.rows, lengths], self._ids.device)[:, :, None]
        columns = columns + torch.arange(tokens.shape[1], device=columns.device)
        self._ids[rows, columns] = tokens.to(self._ids)

    def shown(self, length: int) -> Tensor:
        """``(sequences, length)`` the ids as in plain generation, finished sequences padded."""
        for row, own in enumerate(self.lengths):
            if own < length and not self._takes(row):
                self.ids[row, own:length] = self.pad
        return self.ids[:, :length]

    def append(self, result: HostResult, recorded: Sequence[Recorded] = ()) -> list[int]:
        """Append what a step emitted to each row, until a token stops it; returns how many tokens
        each took. ``recorded``: logits and scores ``(batch, vocab)`` of each token, or nothing.

        Raises:
            RuntimeError: a token could not be sampled, as from ``torch.multinomial``.
        """
        before, self._now = list(self.lengths), None
        for place, (row, tokens) in enumerate(zip(self.rows, result.tokens)):
            for number, token in enumerate(tokens):
                if not self._takes(row):
                    break
                if token < 0:
                    raise RuntimeError(NOT_SAMPLED)
                self._tokens[row].append(token)
                self.lengths[row] += 1
                if recorded:  # a view would hold those of the whole batch
                    own = (one if one is None else one[place].clone() for one in recorded[number])
                    self._recorded[row].append(tuple(own))
                if self._stops[row] is None and self._is_stop(row, token):
                    self._stops[row] = self.lengths[row]
        while self._by_column and self._ask(self._asked + 1):
            self._asked += 1
        self._stream()
        return [max(self.lengths[row] - before[row], 0) for row in self.rows]

    def _takes(self, row: int) -> bool:
        if self.lengths[row] >= self.max_length:
            return False
        if self._pads:
            return self._stops[row] is None
        return None in self._stops or self.lengths[row] < self._end()

    def _is_stop(self, row: int, token: int) -> bool:
        if token in self.eos or self.lengths[row] >= self.max_length:
            return True
        if self._deadline != float("inf") and self._same([time.time() > self._deadline])[0]:
            return True
        for criterion in self._by_token:  # which looks at the last tokens
            last = self._tokens[row][-criterion.maximum_token_len :]
            if bool(criterion(torch.tensor([last], device="cpu"), None).any()):
                return True
        return False

    def _ask(self, length: int) -> bool:
        """Ask criteria about the first tokens of all sequences; False if it is too early or late.

        They see what they would see in plain generation: the whole batch, one more column each
        time, finished sequences padded. Some are ahead of others by then; what they have taken
        beyond a stop is dropped.
        """
        every = range(len(self.lengths))
        running = [row for row in every if (self._stops[row] or length) >= length]
        waits_for = running if self._pads else every
        if not running or min(self.lengths[row] for row in waits_for) < length:
            return False
        shown = self.shown(length)
        scores = None
        if self._asked_scores is not None:
            self._asked_scores.append(self._column(1, length - self.prompt_length - 1))
            scores = tuple(self._asked_scores)
        answers = [
            to_device(criterion(shown, scores), shown.device, torch.bool).expand(len(every))
            for criterion in self._by_column
        ]
        # A transfer for each column, as in plain generation: a stop decides what the next one is.
        stopped = torch.stack(answers).any(0).tolist()
        for row in running:
            if stopped[row]:
                self._stops[row] = length
                if self._pads:
                    self._cut(row, length)
        return True

    def _cut(self, row: int, end: int) -> None:
        """Drop a sequence's tokens from column ``end`` on."""
        dropped = max(self.lengths[row] - end, 0)
        for values in (self._tokens[row], self._recorded[row]):
            del values[max(len(values) - dropped, 0) :]
        self.lengths[row] -= dropped
        self._sent[row] = min(self._sent[row], self.lengths[row])

    def _stream(self) -> None:
        """Pass the columns that all sequences have reached to the streamer, one by one."""
        if self.streamer is None:
            return
        unfinished = [own for row, own in enumerate(self.lengths) if self._takes(row)]
        end = min(unfinished, default=self._end())
        for i in range(self._streamed - self.prompt_length, end - self.prompt_length):
            values = [
                own[i - count] if i < count else self.pad
                for own, count in zip(self._tokens, self.emitted)
            ]
            self.streamer.put(torch.tensor(values, device="cpu"))
        self._streamed = max(end, self._streamed)
        if hasattr(self.streamer, "end_step"):
            self.streamer.end_step()

    def show(self, tree: Tree, result: HostResult) -> None:
        """Pass a step's trees, and what was accepted of them, to a streamer that asks for them."""
        if hasattr(self.streamer, "see_step"):
            self.streamer.see_step(tree, result)

    # -- finishing ---------------------------------------------------------------------------

    def _end(self) -> int:
        if self._pads:
            return max(self.lengths)
        return max((stop for stop in self._stops if stop is not None), default=max(self.lengths))

    def finish(self) -> Tensor:
        """Cut all sequences to a common end and pad them: ``(sequences, seq)``."""
        end = self._end()
        for row in range(len(self.lengths)):
            self._cut(row, end)
            self.ids[row, self.lengths[row] :] = self.pad
        if self.streamer is not None:
            self._stream()
            self.streamer.end()
        return self.ids[:, :end].clone()

    def columns(self, kind: int) -> tuple[Tensor, ...]:
        """Recorded logits (0) or scores (1): ``(sequences, vocab)`` for each emitted column."""
        return tuple(self._column(kind, i) for i in range(max(self.emitted)))

    def _column(self, kind: int, i: int) -> Tensor:
        """``(sequences, vocab)``, zero for sequences that ended before."""
        found = [own[i][kind] if i < len(own) else None for own in self._recorded]
        one = next(value for value in found if value is not None)
        return torch.stack([torch.zeros_like(one) if own is None else own for own in found])


def _reserved(ids: Tensor, end: int) -> Tensor:
    """Ids with room for so many columns, made by doubling."""
    if end <= ids.shape[1]:
        return ids
    grown = ids.new_zeros((len(ids), 2 * end))
    grown[:, : ids.shape[1]] = ids
    return grown


def eos_ids(config: Any) -> list[int]:
    """The tokens that end a text, by a generation config."""
    eos = config.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or ())


def pad_left(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device | str
) -> dict[str, Tensor]:
    """Sequences as left-padded ``input_ids`` and ``attention_mask``, both ``(batch, seq)``."""
    width = max(map(len, rows))
    filled = [[pad] * (width - len(row)) + [*row] for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {
        "input_ids": to_device(filled, device, torch.long),
        "attention_mask": to_device(mask, device, torch.long),
    }
