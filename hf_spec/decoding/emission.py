"""Emitted tokens: stopping criteria, streaming, recorded scores, and the final ids.

Tokens are appended one by one, in order, and nothing past a row's stop is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult

#: More tokens than any call emits; sums of a few such numbers fit into int64.
NO_LIMIT = 2**60


class Emission:
    """The growing sequences of a call.

    Args:
        input_ids: ``(batch, width)`` the prompt as passed to ``generate``.
        real: ``(batch, width)`` bool, False for padding; None if there is none.
        criteria: the prepared stopping criteria; one of them is a ``MaxLengthCriteria``.
        pad_token_id: fills rows past their end.
        streamer: receives the same calls as in plain generation. If it has a method ``end_step``,
            this is called after each step; for ``see_step`` see :meth:`show`.
        record_scores, record_logits: whether to record them per token.
        same: makes numbers equal in all processes that decode together.

    Attributes:
        ids: ``(batch, capacity)`` prompt and emitted tokens, ``lengths[row]`` columns in use; what
            follows is scratch space for a row's candidates. Grows as needed.
        tokens: the rows' real tokens as lists.
        eos: tokens that end a row.
    """

    def __init__(
        self,
        input_ids: Tensor,
        real: Tensor | None,
        criteria: StoppingCriteriaList,
        pad_token_id: int | None,
        streamer: Any = None,
        record_scores: bool = False,
        record_logits: bool = False,
        same: Callable[[Sequence[float]], list[float]] = list,
    ):
        batch, self.width = input_ids.shape
        self.max_length = min(int(criteria.max_length), NO_LIMIT)
        self.ids = input_ids.clone()
        self.lengths = [self.width] * batch
        rows = input_ids.tolist()
        if real is not None:
            rows = [
                [token for token, keep in zip(row, mask) if keep]
                for row, mask in zip(rows, real.tolist())
            ]
        self.tokens: list[list[int]] = rows
        self.streamer = streamer
        self._streamed = self.width
        self._pad = pad_token_id or 0
        #: Column at which a row's criteria first stopped it.
        self._stops: list[int | None] = [None] * batch
        self.scores: list[list[Tensor]] | None = [[] for _ in rows] if record_scores else None
        self.logits: list[list[Tensor]] | None = [[] for _ in rows] if record_logits else None

        # Length, EOS and time are checked on the host; all other criteria are called per token: at
        # once if they judge each row by itself, else when all rows have got that far.
        self.eos: set[int] = set()
        self._deadline, self._same = float("inf"), same
        self._by_row: list[Any] = []
        self._by_column: list[Any] = []
        self._asked = self.width
        self._asked_scores: list[Tensor] = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxTimeCriteria:
                self._deadline = criterion.initial_timestamp + criterion.max_time
            elif type(criterion) is not MaxLengthCriteria:
                alone = batch == 1 or type(criterion) is StopStringCriteria
                (self._by_row if alone else self._by_column).append(criterion)
        # Plain generation pads finished rows if any criterion knows EOS; otherwise they run on
        # until the last row is done.
        self._pads_finished = any(hasattr(criterion, "eos_token_id") for criterion in criteria)

    # -- growing -----------------------------------------------------------------------------

    @property
    def active(self) -> list[bool]:
        """Whether each row still takes tokens."""
        return [self._takes(row) for row in range(len(self.lengths))]

    def _takes(self, row: int) -> bool:
        if self.lengths[row] >= self.max_length:
            return False
        if self._pads_finished or len(self._stops) == 1:
            return self._stops[row] is None
        return None in self._stops or self.lengths[row] < self._end()

    @property
    def remaining(self) -> list[int]:
        """Tokens that each row may still emit."""
        return [self.max_length - length for length in self.lengths]

    @property
    def emitted(self) -> list[int]:
        """Tokens that each row has emitted."""
        return [length - self.width for length in self.lengths]

    def write(self, row: int, start: int, tokens: Sequence[int]) -> None:
        """Put tokens into a row's columns from ``start`` on; buffers grow by doubling."""
        end = start + len(tokens)
        if end > self.ids.shape[1]:
            grown = self.ids.new_zeros((len(self.ids), 2 * end))
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown
        self.ids[row, start:end] = torch.tensor(tokens, device="cpu")

    def shown(self, column: int) -> Tensor:
        """``(batch, column)`` the first columns as in plain generation, finished rows padded."""
        for row, length in enumerate(self.lengths):
            if length < column and not self._takes(row):
                self.ids[row, length:column] = self._pad
        return self.ids[:, :column]

    def take(
        self,
        row: int,
        tokens: Sequence[int],
        scores: Sequence[Tensor] = (),
        logits: Sequence[Tensor] = (),
    ) -> int:
        """Append tokens to a row until one of them stops it.

        Args:
            row: the row.
            tokens: accepted tokens in order.
            scores, logits: ``(vocab,)`` per token, if they are recorded.

        Returns:
            How many tokens were kept.
        """
        kept = 0
        self.write(row, self.lengths[row], tokens)
        for token in tokens:
            if not self._takes(row):
                break
            self.tokens[row].append(token)
            if self.scores is not None:
                self.scores[row].append(scores[kept])
            if self.logits is not None:
                self.logits[row].append(logits[kept])
            self.lengths[row] += 1
            kept += 1
            if self._stops[row] is None and self._is_stop(row, token):
                self._stops[row] = self.lengths[row]
        return kept

    def _is_stop(self, row: int, token: int) -> bool:
        if token in self.eos or self.lengths[row] >= self.max_length:
            return True
        if self._deadline != float("inf") and self._same([time.time() > self._deadline])[0]:
            return True
        if not self._by_row:
            return False
        prefix = self.ids[row : row + 1, : self.lengths[row]]
        scores = None
        if self.scores is not None:
            scores = tuple(one[None] for one in self.scores[row])
        told = (torch.as_tensor(one(prefix, scores), device="cpu") for one in self._by_row)
        return any(bool(one.any()) for one in told)

    def end_step(self) -> None:
        """Ask the criteria that look at the whole batch; pass finished columns to the streamer."""
        while self._by_column and self._ask(self._asked + 1):
            self._asked += 1
        self._stream()

    def _ask(self, column: int) -> bool:
        """Ask criteria about the first ``column`` columns; False if it is too early or too late.

        They see what they would see in plain generation: the whole batch, one more column each
        time, finished rows padded. Rows are ahead of one another by then; what they have taken
        beyond a stop is dropped.
        """
        rows = range(len(self.lengths))
        running = [row for row in rows if (self._stops[row] or column) >= column]
        waits_for = running if self._pads_finished else rows
        if not running or min(self.lengths[row] for row in waits_for) < column:
            return False
        shown = self.shown(column)
        if self.scores is not None:
            self._asked_scores.append(self._column(self.scores, column - self.width - 1))
        scores = None if self.scores is None else tuple(self._asked_scores)
        found = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        for criterion in self._by_column:
            found |= torch.as_tensor(criterion(shown, scores), device="cpu").bool()
        for row in running:
            if found[row]:
                self._stops[row] = column
                if self._pads_finished:
                    self._cut(row, column)
        return True

    def _cut(self, row: int, end: int) -> None:
        """Drop a row's tokens from column ``end`` on."""
        dropped = max(self.lengths[row] - end, 0)
        for taken in (self.tokens, self.scores, self.logits):
            if taken is not None:
                del taken[row][len(taken[row]) - dropped :]
        self.lengths[row] -= dropped

    def _stream(self) -> None:
        """Pass the columns that all rows have reached to the streamer, one by one."""
        if self.streamer is None:
            return
        unfinished = [length for length, active in zip(self.lengths, self.active) if active]
        end = min(unfinished, default=self._end())
        new = self.ids[:, self._streamed : end].to("cpu", copy=True)
        for row, length in enumerate(self.lengths):
            new[row, max(length - self._streamed, 0) :] = self._pad
        for values in new.unbind(1):
            self.streamer.put(values)
        self._streamed = max(end, self._streamed)
        end_step = getattr(self.streamer, "end_step", None)
        if end_step is not None:
            end_step()

    def show(self, tree: Tree, result: HostResult) -> None:
        """Pass a step's trees to the streamer's method ``see_step``, if it has one.

        Args:
            tree: what was verified.
            result: what each row accepted; nothing if it was finished.
        """
        see_step = getattr(self.streamer, "see_step", None)
        if see_step is not None:
            see_step(tree, result)

    # -- finishing ---------------------------------------------------------------------------

    def _end(self) -> int:
        if self._pads_finished:
            return max(self.lengths)
        return max((stop for stop in self._stops if stop is not None), default=max(self.lengths))

    def finish(self) -> Tensor:
        """Cut rows to a common end and pad them: ``(batch, seq)``."""
        end = self._end()
        for row in range(len(self.lengths)):
            self._cut(row, end)
            self.ids[row, self.lengths[row] :] = self._pad
        if self.streamer is not None:
            self._stream()
            self.streamer.end()
        return self.ids[:, :end].clone()

    def columns(self, rows: list[list[Tensor]] | None) -> tuple[Tensor, ...] | None:
        """Recorded scores or logits as one ``(batch, vocab)`` tensor per emitted column."""
        if rows is None:
            return None
        return tuple(self._column(rows, i) for i in range(max(self.lengths) - self.width))

    def _column(self, rows: list[list[Tensor]], i: int) -> Tensor:
        """``(batch, vocab)``, zero for rows that ended before."""
        empty = torch.zeros_like(next(row[0] for row in rows if row))
        return torch.stack([row[i] if i < len(row) else empty for row in rows])
