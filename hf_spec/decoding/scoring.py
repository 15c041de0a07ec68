"""Logits processors on the true prefix of a tree node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList


class Scorer:
    """Applies a call's logits processors to candidates of rows of different lengths.

    A processor sees exactly what plain generation would show it: the row's input ids, padding
    included, followed by the tokens up to the node, and float32 logits.

    Args:
        processors: the prepared list.
        ids: ``(batch, capacity)`` input ids and emitted tokens; columns behind a row's length are
            scratch space.
        lengths: columns in use per row; updated by the owner.
    """

    def __init__(self, processors: LogitsProcessorList, ids: Tensor, lengths: list[int]):
        self.processors = processors
        self.ids = ids
        self.lengths = lengths

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
            logits: ``(batch, vocab)``.
            suffixes: tokens to append to each row before its processors run.
            active: rows that matter; the others keep their logits.

        Returns:
            ``(batch, vocab)`` float32 on the logits' device.
        """
        device, scores = logits.device, logits.float()
        if self.trivial:
            return scores
        scores = scores.to(self.ids.device)
        groups: dict[int, list[int]] = {}
        for row, suffix in enumerate(suffixes):
            if active is not None and not active[row]:
                continue
            start = self.lengths[row]
            if suffix:
                self.ids[row, start : start + len(suffix)] = torch.tensor(suffix)
            groups.setdefault(start + len(suffix), []).append(row)
        result = scores
        for length, rows in groups.items():
            # The whole batch, since processors may count on its size and on a row's index in it;
            # what they say about rows of another length is dropped.
            part = self.processors(self.ids[:, :length], scores.clone())
            everyone = len(rows) == len(suffixes)
            result = part if everyone else result.index_copy(0, _index(rows, part), part[rows])
        return result.to(device)


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)
