"""Logits processors that are told apart by what they see, and callers' code that raises."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, MaxLengthCriteria, StoppingCriteria
from transformers.generation.streamers import BaseStreamer


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


class Failure(Exception):
    """What a caller's own code raises."""


class Fails(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Whatever generate calls: raises in call number ``at``; as a streamer also where it ends."""

    eos_token_id = torch.tensor([-1])

    def __init__(self, at: int | None, error: type[BaseException] = Failure):
        self.at, self.calls, self.error = at, 0, error

    def put(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error

    def end(self) -> None:
        raise self.error


class Processor(Fails):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.put()
        return scores


class Criterion(Fails):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.put()
        return input_ids.new_zeros(len(input_ids), dtype=torch.bool)


class Column(StoppingCriteria):
    """Ends rows by all that the batch shows, and by how often it was called."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return (input_ids.sum(-1) + input_ids.sum() + self.calls) % 13 == 0


class Sooner(MaxLengthCriteria):
    """One of the user's own, which is only called like Transformers'."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -1] % 5 == 1) | (input_ids.shape[1] >= self.max_length - 2)


class Streamed(list[Any], BaseStreamer):
    """Keeps what it gets."""

    def put(self, value: Tensor) -> None:
        self.append(value.tolist())

    def end(self) -> None:
        self.append("end")
