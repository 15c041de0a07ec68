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
)

from hf_spec.drafting.drafter import Draft

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

        # Length, EOS and time are checked on the host; all other criteria are called per token.
        self._eos: set[int] = set()
        self._deadline, self._same = float("inf"), same
        self._others = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos |= set(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxTimeCriteria:
                self._deadline = criterion.initial_timestamp + criterion.max_time
            elif type(criterion) is not MaxLengthCriteria:
                self._others.append(criterion)
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
        stops = [stop for stop in self._stops if stop is not None]
        return len(stops) < len(self._stops) or self.lengths[row] < max(stops)

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
        self.ids[row, start:end] = torch.tensor(tokens)

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
        if token in self._eos or self.lengths[row] >= self.max_length:
            return True
        if self._deadline != float("inf") and self._same([time.time() > self._deadline])[0]:
            return True
        if not self._others:
            return False
        prefix = self.ids[row : row + 1, : self.lengths[row]]
        scores = None
        if self.scores is not None:
            scores = tuple(one[None] for one in self.scores[row])
        return any(self._ask(criterion, prefix, scores) for criterion in self._others)

    def _ask(self, criterion: Any, prefix: Tensor, scores: Any) -> bool:
        """Whether a criterion stops a row. It sees only that row, as rows differ in length.

        Raises:
            ValueError: if the criterion needs the other rows of the batch.
        """
        try:
            return bool(torch.as_tensor(criterion(prefix, scores)).any())
        except IndexError as error:
            batch = len(self.lengths)
            if batch == 1:
                raise
            raise ValueError(
                f"stopping_criteria: {type(criterion).__name__} cannot do with one row of a batch "
                f"of {batch} ({error}). With a strategy rows differ in length, so that criteria "
                "are asked row by row. Generate with batch size 1, or leave assistant_strategy out."
            ) from error

    def stream(self) -> None:
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

    def show(self, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        """Pass a step's draft to the streamer's method ``see_step``, if it has one.

        Args:
            draft: what was forwarded.
            nodes: the accepted nodes of each row, root first; none if the row was finished.
        """
        see_step = getattr(self.streamer, "see_step", None)
        if see_step is not None:
            see_step(draft, nodes)

    # -- finishing ---------------------------------------------------------------------------

    def _end(self) -> int:
        if self._pads_finished:
            return max(self.lengths)
        return max((stop for stop in self._stops if stop is not None), default=max(self.lengths))

    def finish(self) -> Tensor:
        """Cut rows to a common end and pad them: ``(batch, seq)``."""
        end = self._end()
        for row, length in enumerate(self.lengths):
            self.lengths[row] = min(length, end)
            del self.tokens[row][len(self.tokens[row]) - (length - self.lengths[row]) :]
            self.ids[row, self.lengths[row] :] = self._pad
        if self.streamer is not None:
            self.stream()
            self.streamer.end()
        return self.ids[:, :end].clone()

    def columns(self, rows: list[list[Tensor]] | None) -> tuple[Tensor, ...] | None:
        """Recorded scores or logits as one ``(batch, vocab)`` tensor per emitted column."""
        if rows is None:
            return None
        count = max(self.lengths) - self.width
        empty = torch.zeros_like(next(row[0] for row in rows if row))
        return tuple(
            torch.stack([row[i] if i < len(row) else empty for row in rows]) for i in range(count)
        )
