"""The random numbers of sampling, known before the tokens that they choose.

``torch.multinomial`` draws a token as argmax over y of p(y) / E(y), where the E(y) ~ Exp(1) are
drawn for each token: the Gumbel-max trick, since -log E(y) is Gumbel distributed (Maddison et al.,
"A* Sampling", 2014, section 2). E does not depend on p. So the numbers of tokens to come can be
drawn first and shown to a drafter, which then proposes what is likely to be sampled *with them*
(Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024).

A token depends on p and on its own E only, never on the draft tokens, so output is sampled from the
same distribution, and with the same numbers it is the same whatever was drafted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_spec.core.device import to_device
from hf_spec.core.memory import RUNNING
from hf_spec.core.verify import sample
from hf_spec.modeling_patches.ranks import random_state, set_random_state

#: How far a drafter's logits are trusted where tokens are sampled, see :func:`as_sampled`
#: (docs/inside/appendix_choices.md).
TRUST = 0.8
#: Draws from the default generator that can be given back.
REMEMBERED = 64


def as_sampled(logits: Tensor, noise: Tensor) -> Tensor:
    """A drafter's logits of the tokens that will be sampled: P(y) = softmax(TRUST (z'(y) + T g(y)))
    with its own logits z' and what :meth:`SamplingNoise.ahead` gives, all broadcast. The factor is
    temperature scaling (Guo et al., "On Calibration of Modern Neural Networks", 2017, section 4.2):
    a drafter knows the model's logits only roughly."""
    return TRUST * (logits + noise)


class _States(NamedTuple):
    """States of the default generator around the draw for a token."""

    token: int
    before: Tensor
    after: Tensor


class SamplingNoise:
    """The numbers that the tokens of each sequence are sampled with.

    A single sequence draws from the device's default generator, in the order of plain ``generate``:
    the same seed gives the same tokens. Of several, each has a generator of its own, seeded by the
    default one: its tokens depend neither on the others nor on the number of steps.

    Args:
        batch_size: number of sequences.
        device: whose generators are used; that of the call's ``input_ids``, as in Transformers.
        temperature: of the call. The larger it is, the more the numbers decide.
        seeds: those of each sequence's generator; None for what is said above.
    """

    def __init__(
        self, batch_size: int, device: torch.device, temperature: float = 1.0,
        seeds: Sequence[int] | None = None,
    ):  # fmt: skip
        self.device = device
        self.temperature = temperature
        self._generators: list[torch.Generator | None] = [None]
        if seeds is None and batch_size > 1:
            with RUNNING:
                seeds = torch.randint(2**48, (batch_size,), device=device).tolist()
        if seeds is not None:
            self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        #: Of each sequence, E of the next tokens as far as they are drawn, ``(vocab,)`` each.
        self._drawn: list[deque[Tensor]] = [deque() for _ in range(batch_size)]
        #: See :meth:`favor`.
        self._favored: Sequence[Sequence[int]] = [()] * batch_size
        self._lenience = 1.0
        self._vocab = 0
        self._states: deque[_States] = deque(maxlen=REMEMBERED)
        self._draws = 0  # from the default generator

    def choose(self, scores: Tensor, ahead: int, rows: Sequence[int] | None = None) -> Tensor:
        """Sample a token of each sequence: what ``torch.multinomial`` would draw.

        Args:
            scores: ``(batch, vocab)`` float32, logarithms of p up to a constant.
            ahead: tokens between the last one that was emitted and this one.
            rows: sequences that take a token; None for all.

        Returns:
            ``(batch,)`` int64; 0 for other sequences, -1 if probabilities are not finite.
        """
        batch, self._vocab = scores.shape
        index = to_device(list(range(batch) if rows is None else rows), scores.device, torch.long)
        p = scores[index].softmax(-1).to(self.device)
        noise = torch.stack([self._of(row, ahead) for row in rows or range(batch)])
        chosen = sample(p, noise=noise).to(scores.device)
        return index.new_zeros(batch).index_copy(0, index, chosen)

    def ahead(self, count: int, tokens: Tensor | None = None, first: int = 0) -> Tensor:
        """What sampling adds to the logits of tokens to come.

        Sampling takes the token of the largest sum of the logit and this: the temperature times the
        Gumbel noise -log E.

        Args:
            count: number of tokens to come, of each sequence, from 1.
            tokens: ``(n,)`` ids whose noise is wanted; None for the whole vocabulary.
            first: tokens to come before these.

        Returns:
            ``(batch, count, n)`` float32
        """
        found = self.drawn(count, first)
        if tokens is not None:
            found = found[..., tokens.to(self.device)]
        return -self.temperature * found.log()

    def drawn(self, count: int, first: int = 0) -> Tensor:
        """E of the next tokens of each sequence, ``(batch, count, vocab)``, after ``first``."""
        rows = range(len(self._drawn))
        own = [[self._of(row, first + place) for place in range(count)] for row in rows]
        return torch.stack([torch.stack(one) for one in own])

    def favor(self, tokens: Sequence[Sequence[int]], lenience: float) -> None:
        """Until the next call, make these tokens so many times as likely, the first ones of each
        sequence's next tokens. **Lossy**."""
        self._favored, self._lenience = tokens, lenience

    def advance(self, counts: Sequence[int]) -> None:
        """Go on to the tokens after those that each sequence has emitted."""
        for drawn, count in zip(self._drawn, counts):
            for _ in range(min(count, len(drawn))):
                drawn.popleft()
        self._favored = [some[count:] for some, count in zip(self._favored, counts)]

    def select(self, rows: Sequence[int]) -> None:
        """Follow the batch, whose row ``i`` is now the former ``rows[i]``."""
        self._drawn = [self._drawn[row] for row in rows]
        self._favored = [self._favored[row] for row in rows]
        self._generators = [self._generators[row] for row in rows]

    def give_back(self, used: int) -> None:
        """Undo the draws for tokens that were never emitted, as only ``used`` were, so that the
        default generator goes on as after plain ``generate``. Does nothing if anything else has
        drawn since."""
        with RUNNING:  # calls in other threads draw from the same default generator
            unused = [one for one in self._states if one.token >= used]
            if not unused or unused[0].token > used:
                return
            later = [*(one.before for one in unused[1:]), random_state(self.device)]
            if all(torch.equal(one.after, state) for one, state in zip(unused, later)):
                set_random_state(self.device, unused[0].before)

    def _of(self, row: int, ahead: int) -> Tensor:
        """E of a token to come."""
        drawn, generator = self._drawn[row], self._generators[row]
        while len(drawn) <= ahead:
            noise = torch.empty(self._vocab, dtype=torch.float32, device=self.device)
            if generator is not None:
                drawn.append(noise.exponential_(generator=generator))
                continue
            with RUNNING:
                before = random_state(self.device)
                drawn.append(noise.exponential_())
                self._states.append(_States(self._draws, before, random_state(self.device)))
            self._draws += 1
        found = drawn[ahead]
        if ahead < len(self._favored[row]):
            found = found.clone()
            found[self._favored[row][ahead]] /= self._lenience
        return found
