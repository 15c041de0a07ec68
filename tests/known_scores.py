"""Scores of a tree that a test has made, in the place of a model."""

from __future__ import annotations

import torch
from torch import Tensor


class Scores:
    """A ``ScoreFn`` over known scores (batch, nodes, vocab); rows not asked for get rubbish.

    ``asked``: the nodes asked for, per row, in order (of the first rows only: lists are slow).
    """

    def __init__(self, scores: Tensor):
        self.scores = scores
        self.calls = 0
        self.asked: list[list[int]] = [[] for _ in scores[:100]]

    def __call__(self, nodes: Tensor, active: Tensor) -> Tensor:
        assert nodes.shape == active.shape == (len(self.scores),)
        self.calls += 1
        for row in active[: len(self.asked)].nonzero()[:, 0].tolist():
            self.asked[row].append(int(nodes[row]))
        rows = torch.arange(len(nodes))
        return torch.where(active[:, None], self.scores[rows, nodes], torch.nan)
