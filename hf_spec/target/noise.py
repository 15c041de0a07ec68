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
from torch.nn.functional import pad

from hf_spec.core.device import FollowsRows, to_device
from hf_spec.core.verify import sample
from hf_spec.modeling_patches.weights import random_state, set_random_state
from hf_spec.threads import RUNNING

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


def drawn_seeds(count: int, device: torch.device) -> list[int]:
    """Seeds of the generators of several sequences, from the default one."""
    with RUNNING:
        seeds: list[int] = torch.randint(2**48, (count,), device=device).tolist()
    return seeds


class SequenceNoise:
    """The numbers that the tokens of one sequence are sampled with.

    Args:
        device: see :class:`SamplingNoise`.
        temperature: of its call.
        generator: draws them; None for the device's default one.
    """

    def __init__(
        self, device: torch.device, temperature: float, generator: torch.Generator | None = None
    ):
        self.device, self.temperature = device, temperature
        self._generator = generator
        #: E of the next tokens as far as they are drawn, ``(vocab,)`` each.
        self._drawn: deque[Tensor] = deque()
        #: See :meth:`SamplingNoise.favor`.
        self.favored: Sequence[int] = ()
        self.lenience = 1.0
        self._states: deque[_States] = deque(maxlen=REMEMBERED)
        self._draws = 0  # from the default generator

    def of(self, ahead: int, vocab: int) -> Tensor:
        """E of a token to come."""
        while len(self._drawn) <= ahead:
            self._drawn.append(self._draw(vocab))
        found = self._drawn[ahead]
        if ahead < len(self.favored):
            found = found.clone()
            found[self.favored[ahead]] /= self.lenience
        return found

    def _draw(self, vocab: int) -> Tensor:
        noise = torch.empty(vocab, dtype=torch.float32, device=self.device)
        if self._generator is not None:
            return noise.exponential_(generator=self._generator)
        with RUNNING:
            before = random_state(self.device)
            noise.exponential_()
            self._states.append(_States(self._draws, before, random_state(self.device)))
        self._draws += 1
        return noise

    def advance(self, count: int) -> None:
        """Go on to the tokens after so many that were emitted."""
        for _ in range(min(count, len(self._drawn))):
            self._drawn.popleft()
        self.favored = self.favored[count:]

    def give_back(self, used: int) -> None:
        """See :meth:`SamplingNoise.give_back`."""
        with RUNNING:  # calls in other threads draw from the same default generator
            unused = [one for one in self._states if one.token >= used]
            if not unused or unused[0].token > used:
                return
            later = [*(one.before for one in unused[1:]), random_state(self.device)]
            if all(torch.equal(one.after, state) for one, state in zip(unused, later)):
                set_random_state(self.device, unused[0].before)


class SamplingNoise(FollowsRows):
    """The numbers that the tokens of each sequence are sampled with.

    A single sequence draws from the device's default generator, in the order of plain ``generate``:
    the same seed gives the same tokens. Of several, each has a generator of its own, seeded by the
    default one: its tokens depend neither on the others nor on the number of steps.

    Args:
        batch_size: number of sequences.
        device: whose generators are used; that of the call's ``input_ids``, as in Transformers.
        temperature: of the call. The larger it is, the more the numbers decide.
        seeds: those of each sequence's generator; None for what is said above.

    Attributes:
        rows: what each row of the batch is sampled with.
        vocabulary: number of the model's logits, where processors may leave some out of the scores
            that tokens are sampled by.
    """

    of_rows = ("rows",)

    def __init__(
        self, batch_size: int, device: torch.device, temperature: float = 1.0,
        seeds: Sequence[int] | None = None,
    ):  # fmt: skip
        self.device = device
        if seeds is None and batch_size > 1:
            seeds = drawn_seeds(batch_size, device)
        generators: Sequence[torch.Generator | None] = [None]
        if seeds is not None:
            generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.rows = [SequenceNoise(device, temperature, one) for one in generators]
        self._vocab = self.vocabulary = 0

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
        taking = list(range(batch) if rows is None else rows)
        index = to_device(taking, scores.device, torch.long)
        if not taking:
            return index.new_zeros(batch)
        p = scores[index].softmax(-1).to(self.device)
        noise = torch.stack([self.rows[row].of(ahead, self._vocab) for row in taking])
        chosen = sample(p, noise=noise).to(scores.device)
        return index.new_zeros(batch).index_copy(0, index, chosen)

    def ahead(self, count: int, tokens: Tensor | None = None) -> Tensor:
        """What sampling adds to the logits of tokens to come.

        Sampling takes the token of the largest sum of the logit and this: the temperature times the
        Gumbel noise -log E.

        Args:
            count: number of tokens to come, of each sequence, from 1.
            tokens: ``(n,)`` ids whose noise is wanted; None for the whole vocabulary.

        Returns:
            ``(batch, count, n)`` float32
        """
        found = self.drawn(count)
        if tokens is not None:
            found = found[..., tokens.to(self.device)]
        return -self.scaled(found.log())

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits ``(batch, ...)`` times the temperature of each row."""
        first, *others = self.temperatures
        if others.count(first) == len(others):
            return first * logits
        each = to_device([first, *others], logits.device)
        return each.view(-1, *[1] * (logits.ndim - 1)) * logits

    @property
    def temperatures(self) -> list[float]:
        """Of each row's call."""
        return [row.temperature for row in self.rows]

    def drawn(self, count: int) -> Tensor:
        """E of the next tokens of each sequence, ``(batch, count, vocab)``; infinite for tokens
        that are never sampled."""
        own = [[row.of(place, self._vocab) for place in range(count)] for row in self.rows]
        found = torch.stack([torch.stack(one) for one in own])
        missing = self.vocabulary - self._vocab
        return pad(found, (0, missing), value=float("inf")) if missing > 0 else found

    def favor(self, tokens: Sequence[Sequence[int]], lenience: float) -> None:
        """Until the next call, make these tokens so many times as likely, the first ones of each
        sequence's next tokens. **Lossy**."""
        for row, favored in zip(self.rows, tokens):
            row.favored, row.lenience = favored, lenience

    def advance(self, counts: Sequence[int]) -> None:
        """Go on to the tokens after those that each sequence has emitted."""
        for row, count in zip(self.rows, counts):
            row.advance(count)

    def give_back(self, used: int) -> None:
        """Undo the draws for tokens of a single sequence that were never emitted, as only ``used``
        were, so that the default generator goes on as after plain ``generate``. Does nothing if
        anything else has drawn since."""
        self.rows[0].give_back(used)

    def join(self, other: SamplingNoise) -> None:
        super().join(other)
        self._vocab = self._vocab or other._vocab
