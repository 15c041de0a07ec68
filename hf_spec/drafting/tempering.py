"""How far predictions, and the noise of sampling, are to be trusted; learned while decoding.

Sampling takes the token of the largest z(y) / T + g(y), with the model's logits z, temperature T
and known noise g (:mod:`hf_spec.drafting.noise`). A drafter knows z only roughly. It expects

    P(y) = softmax(sharpness * z'(y) + share * T * g(y))

with its own logits z'. Both numbers are fitted to the tokens that followed, by maximum likelihood;
the first is temperature scaling (Guo et al., "On Calibration of Modern Neural Networks", 2017,
section 4.2). A drafter that is good at the text wants the whole noise (1); one that is uncertain
where the model is not wants little of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_spec.core.memory import locked
from hf_spec.core.transfer import sent
from hf_spec.drafting.draft_vocabulary import places_of
from hf_spec.drafting.tree_drafter import TreeDrafter

#: One in so many steps that sample teaches both numbers: at first, and after so many updates.
OFTEN, SELDOM, SETTLED = 4, 16, 64
#: Their bounds.
SHARPNESS, SHARE = (0.25, 1.5), (0.05, 1.2)
#: Step sizes in logarithms: the first, which falls with the root of their number, and the least.
FIRST, LEAST = 0.2, 0.02
#: Weight of a new gradient in the mean square that divides them.
ALPHA = 0.05


@dataclass
class Tempering:
    """The numbers for one adapter on one model.

    Attributes:
        sharpness: factor on the drafter's logits.
        share: factor on the noise, beside the temperature.
        updates: how often they were changed.
        steps: steps that they could be learned from.
    """

    sharpness: float = 1.0
    share: float = 0.6
    updates: int = 0
    steps: int = 0
    _squares: tuple[float, float] = (0.0, 0.0)

    def learns(self) -> bool:
        """Count a step that samples; return whether to learn from it."""
        self.steps += 1
        return self.steps % (OFTEN if self.updates < SETTLED else SELDOM) == 0

    def learn(
        self, logits: Tensor, noise: Tensor, tokens: Tensor, valid: Tensor,
        ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Learn from the tokens that followed: a step along the gradient of their log-likelihood.

        Args:
            logits: ``(..., vocab)`` z', given the tokens before.
            noise: ``(..., vocab)`` T g.
            tokens: ``(...)`` those that followed; negative where there is none.
            valid: ``(...)`` bool, False for tokens that do not count.
            ids: ``(vocab,)`` ids of the logits, ascending; None if these are the indices.
        """
        place, known = places_of(tokens, None if ids is None else ids.to(tokens.device))
        tokens, valid = place.flatten(), (known & valid).flatten()
        logits, noise = (part.flatten(0, -2).float() for part in (logits, noise))
        expected = (self.sharpness * logits + self.share * noise).softmax(-1)
        kept = valid / valid.sum().clamp(min=1)
        slopes = [
            ((part.gather(-1, tokens[:, None])[:, 0] - (expected * part).sum(-1)) * kept).nansum()
            for part in (logits, noise)
        ]
        *found, count = torch.stack([*slopes, valid.sum().to(slopes[0])]).tolist()
        if count:
            self._move(found)

    @locked
    def _move(self, found: Sequence[float]) -> None:
        """Move both numbers along their slopes. Other threads wait for this, not for the device."""
        self.updates += 1
        size = max(FIRST / math.sqrt(self.updates), LEAST)
        weight = max(ALPHA, 1 / self.updates)
        values, squares = [self.sharpness, self.share], []
        for place, (low, high) in enumerate((SHARPNESS, SHARE)):
            slope = values[place] * found[place]  # of the logarithm
            square = (1 - weight) * self._squares[place] + weight * slope**2
            change = size * slope / math.sqrt(square) if square > 0 else 0.0
            values[place] = min(max(values[place] * math.exp(change), low), high)
            squares.append(square)
        self.sharpness, self.share = values
        self._squares = squares[0], squares[1]


def following(emitted: Sequence[Sequence[int]], count: int, device: torch.device) -> Tensor:
    """``(batch, count)`` the first tokens that each sequence emitted; -1 behind them."""
    return sent([[*row, *[-1] * count][:count] for row in emitted], device)


class Sample(NamedTuple):
    """What a step's predictions were made from, to learn from the tokens that come.

    Attributes:
        hidden, root, known: see :meth:`TreeDrafter.predictions`.
        noise: ``(batch, depth, tokens)``, see :meth:`SamplingNoise.ahead`.
    """

    hidden: Tensor
    root: Tensor
    known: Sequence[int] | Tensor
    noise: Tensor

    def teach(
        self, tempering: Tempering, drafter: TreeDrafter, emitted: Sequence[Sequence[int]]
    ) -> None:
        """Learn from the tokens of each sequence, at all distances that they reach, after what the
        drafter has predicted."""
        hidden, root, known, noise = self
        depth, device = noise.shape[1], noise.device
        tokens = following(emitted, depth, device)
        distances = torch.arange(depth, device=device)
        reached = sent(known, device)[:, None] > distances
        before = tokens[:, :-1].clamp(min=0)
        previous = torch.cat([root.to(device)[:, None], before], dim=1)
        logits = drafter.given(hidden, previous.to(hidden.device)).to(device)
        tempering.learn(logits, noise, tokens, reached, drafter.token_ids)
