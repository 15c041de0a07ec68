"""Logits processors on the true prefix of a tree node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from hf_spec.decoding.emission import Emission

#: Processors that treat each row alone and never look at its tokens.
ROWWISE = (
    stock.EpsilonLogitsWarper, stock.EtaLogitsWarper, stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization, stock.MinPLogitsWarper, stock.SuppressTokensLogitsProcessor,
    stock.TemperatureLogitsWarper, stock.TopKLogitsWarper, stock.TopPLogitsWarper,
    stock.TypicalLogitsWarper,
)  # fmt: skip

#: Processors whose result depends on the rows' tokens and logits alone, not on earlier calls.
STATELESS = (
    *ROWWISE, stock.EncoderNoRepeatNGramLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor, stock.ExponentialDecayLengthPenalty,
    stock.ForcedBOSTokenLogitsProcessor, stock.ForcedEOSTokenLogitsProcessor,
    stock.MinLengthLogitsProcessor, stock.MinNewTokensLengthLogitsProcessor,
    stock.NoBadWordsLogitsProcessor, stock.NoRepeatNGramLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor, stock.SequenceBiasLogitsProcessor,
    stock.SuppressTokensAtBeginLogitsProcessor, stock.TopHLogitsWarper,
    stock.WatermarkLogitsProcessor,
)  # fmt: skip


def is_stateless(processor: Any) -> bool:
    """Whether it is known that a processor's result does not depend on its earlier calls.

    Known are those of Transformers, and any that says so by an attribute ``stateless = True``.
    """
    return type(processor) in STATELESS or getattr(processor, "stateless", False) is True


class Scorer:
    """Applies a call's logits processors to candidates of rows of different lengths.

    A processor sees exactly what it sees in plain generation: the row's input ids, padding
    included, followed by the tokens up to the node, and float32 logits. It sees all rows of the
    call in order, even after the batch has shrunk: rows that have left keep their last logits, and
    finished rows are padded. Those at the end of the list that treat rows alone, such as the
    temperature, see only the rows whose scores are needed.

    A processor that may keep a state, such as a grammar matcher, must be called once for each
    column. The rows of a batch are then of equal length (``lockstep``).

    Args:
        processors: the prepared list.
        emission: the call's rows; suffixes are written after them.

    Attributes:
        stateful: names of the processors that may keep a state.
        lockstep: whether all rows must take equally many tokens in each step.
    """

    def __init__(self, processors: LogitsProcessorList, emission: Emission):
        self.processors = processors
        known = LogitsProcessorList([one for one in processors if is_stateless(one)])
        self.stateful = [type(one).__name__ for one in processors if not is_stateless(one)]
        self._all = _split(processors)
        self._drafting = _split(known) if self.stateful else self._all
        self.emission = emission
        self.lengths = emission.lengths
        self.lockstep = bool(self.stateful) and len(self.lengths) > 1
        #: The call's row for each row of the batch, and the last logits of all rows.
        self._rows = list(range(len(self.lengths)))
        self._shown: Tensor | None = None

    def select(self, rows: Sequence[int]) -> None:
        """Follow the batch, whose row ``i`` is now the one that was ``rows[i]``."""
        self._rows = [self._rows[row] for row in rows]

    @property
    def eos(self) -> set[int]:
        """Tokens that end a row."""
        return self.emission.eos

    @property
    def trivial(self) -> bool:
        """Whether scores are just the logits."""
        return len(self.processors) == 0

    def __call__(
        self,
        logits: Tensor,
        suffixes: Sequence[Sequence[int]],
        active: Sequence[bool] | None = None,
        drafting: bool = False,
    ) -> Tensor:
        """Scores after all processors.

        Args:
            logits: ``(batch, vocab)`` of the rows that the batch carries.
            suffixes: tokens to append to each row before its processors run.
            active: rows to process; the others keep their logits.
            drafting: leave out processors that may keep a state: a draft's tokens are not yet the
                text that they follow.

        Returns:
            ``(batch, vocab)`` float32 on the logits' device.
        """
        device, scores = logits.device, logits.float()
        wide, rowwise = self._drafting if drafting else self._all
        if not wide and not rowwise:
            return scores
        scores = scores.to(self.emission.ids.device)
        if wide:
            scores = self._together(wide, scores, suffixes, active)
        if rowwise:
            rows = [row for row in range(len(scores)) if active is None or active[row]]
            if len(rows) == len(scores):
                scores = rowwise(self.emission.ids, scores.clone())
            elif rows:
                index = _index(rows, scores)
                scores = scores.index_copy(0, index, rowwise(self.emission.ids, scores[index]))
        return scores.to(device)

    def _together(
        self, processors: LogitsProcessorList, scores: Tensor,
        suffixes: Sequence[Sequence[int]], active: Sequence[bool] | None,
    ) -> Tensor:  # fmt: skip
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
            part = processors(self.emission.shown(length), scores.clone())
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


def _split(processors: LogitsProcessorList) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """Processors that see the whole batch, and those after them that treat rows alone."""
    wide = [place for place, one in enumerate(processors, 1) if type(one) not in ROWWISE]
    last = max(wide, default=0)
    return LogitsProcessorList(processors[:last]), LogitsProcessorList(processors[last:])


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)
