"""Logits processors that are told apart by what they see."""

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Shown(LogitsProcessor):
    """Records the ids that it is shown, and their scores."""

    def __init__(self) -> None:
        self.ids: list[list[list[int]]] = []
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.ids.append(input_ids.tolist())
        self.scores.append(scores.clone())
        return scores


class ByRow(LogitsProcessor):
    """Forbids other tokens in each row, in place; sees the whole batch, whichever rows are
    finished."""

    def __init__(self, rows: int):
        self.rows = rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(input_ids) == len(scores) == self.rows
        for row in range(self.rows):
            scores[row, row :: self.rows + 1] = -float("inf")
        return scores


class Matcher(LogitsProcessor):
    """Allows half of the vocabulary, which half by all the row's tokens; notes what it is shown.

    Like a grammar matcher, it must be called exactly once for each token.
    """

    def __init__(self) -> None:
        self.state: list[int] | None = None
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(input_ids.tolist())
        if self.state is None:
            self.state = [0] * len(input_ids)
        else:
            last = input_ids[:, -1].tolist()
            self.state = [(s * 31 + t + 1) % 1009 for s, t in zip(self.state, last)]
        allowed = torch.arange(scores.shape[1])[None] + torch.tensor(self.state)[:, None]
        return scores.masked_fill(allowed % 2 == 1, -torch.inf)
