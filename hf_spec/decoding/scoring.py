"""Logits processors on the true prefix of a tree node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_spec.decoding.emission import Emission
from hf_spec.drafting.drafter import Process

#: Processors that treat each row alone and never look at its tokens.
ROWWISE = (
    EpsilonLogitsWarper, EtaLogitsWarper, InfNanRemoveLogitsProcessor, LogitNormalization,
    MinPLogitsWarper, SuppressTokensLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper,
    TopPLogitsWarper, TypicalLogitsWarper,
)  # fmt: skip


class Processors(Process, Protocol):
    """Processors of the sequences of a batch, which may shrink."""

    def select(self, rows: Sequence[int]) -> None:
        """Follow the batch, whose row ``i`` is now the one that was ``rows[i]``."""


class Scorer:
    """Applies a call's logits processors to candidates of rows of different lengths.

    A processor sees exactly what it sees in plain generation: the row's input ids, padding
    included, followed by the tokens up to the node, and float32 logits. It sees all rows of the
    call in order, even after the batch has shrunk: rows that have left keep their last logits.
    Those at the end of the list that treat rows alone, such as the temperature, see only the rows
    whose scores are needed.

    Args:
        processors: the prepared list.
        emission: the call's rows; suffixes are written after them.
    """

    def __init__(self, processors: LogitsProcessorList, emission: Emission):
        self.processors = processors
        wide = [place for place, one in enumerate(processors, 1) if type(one) not in ROWWISE]
        last = max(wide, default=0)
        self._wide = LogitsProcessorList(processors[:last])
        self._rowwise = LogitsProcessorList(processors[last:])
        self.emission = emission
        self.lengths = emission.lengths
        #: The call's row for each row of the batch, and the last logits of all rows.
        self._rows = list(range(len(self.lengths)))
        self._shown: Tensor | None = None

    def select(self, rows: Sequence[int]) -> None:
        """Follow the batch, whose row ``i`` is now the one that was ``rows[i]``."""
        self._rows = [self._rows[row] for row in rows]

    @property
    def trivial(self) -> bool:
        """Whether scores are just the logits."""
        return len(self.processors) == 0

    def __call__(
        self,
        logits: Tensor,
        suffixes: Sequence[Sequence[int]],
        active: Sequence[bool] | None = None,
    ) -> Tensor:
        """Scores after all processors.

        Args:
            logits: ``(batch, vocab)`` of the rows that the batch carries.
            suffixes: tokens to append to each row before its processors run.
            active: rows to process; the others keep their logits.

        Returns:
            ``(batch, vocab)`` float32 on the logits' device.
        """
        device, scores = logits.device, logits.float()
        if self.trivial:
            return scores
        scores = scores.to(self.emission.ids.device)
        if self._wide:
            scores = self._together(scores, suffixes, active)
        if self._rowwise:
            rows = [row for row in range(len(scores)) if active is None or active[row]]
            if len(rows) == len(scores):
                scores = self._rowwise(self.emission.ids, scores.clone())
            elif rows:
                index = _index(rows, scores)
                scores = scores.index_copy(
                    0, index, self._rowwise(self.emission.ids, scores[index])
                )
        return scores.to(device)

    def _together(
        self, scores: Tensor, suffixes: Sequence[Sequence[int]], active: Sequence[bool] | None
    ) -> Tensor:
        """:meth:`__call__` for processors that see the whole batch."""
        scores = self._of_all(scores)
        groups: dict[int, list[int]] = {}
        for row, place in sorted(zip(self._rows, range(len(suffixes)))):  # in the call's order
            suffix = suffixes[place]
            if active is not None and not active[place]:
                continue
            start = self.lengths[row]
            if suffix:
                self.emission.write(row, start, suffix)
            groups.setdefault(start + len(suffix), []).append(row)
        result = scores
        for length, rows in groups.items():
            # The whole batch, since processors may rely on its size and on a row's index; their
            # results for rows of another length are dropped.
            part = self._wide(self.emission.ids[:, :length], scores.clone())
            everyone = len(rows) == len(self.lengths)
            result = part if everyone else result.index_copy(0, _index(rows, part), part[rows])
        if len(self._rows) < len(self.lengths):
            result = result[self._rows]
        return result

    def _of_all(self, logits: Tensor) -> Tensor:
        """Logits of all rows of the call, given those of the current batch."""
        if self._shown is None or len(self._rows) == len(self.lengths):
            self._shown = logits
        else:
            self._shown = self._shown.index_copy(0, _index(self._rows, logits), logits)
        return self._shown


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)
