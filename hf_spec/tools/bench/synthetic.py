"""Acceptance at given rates, whatever the drafts are: speed without a trained drafter.

The steps are those of the strategy, with all their costs; only the choice of what is accepted is
replaced. Outputs are therefore not the model's.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig

from hf_spec.core import verify
from hf_spec.core.checks import check_range
from hf_spec.core.device import Ragged, bucket, to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult, VerifyProgram
from hf_spec.decoding.acceptance import Acceptance, Scorer
from hf_spec.draft.options import DraftOptions
from hf_spec.threads import forget, memory

#: The command line's option, for messages.
OPTION = "--synthetic-acceptance"


@dataclass(frozen=True)
class SyntheticRates:
    """How often drafts are accepted.

    Attributes:
        rates: the i-th is the probability that the first i draft tokens are all accepted, as vLLM's
            ``synthetic_acceptance_rates`` have it; deeper ones never are. tau, where every step
            drafts so deep, is 1 plus their sum.

    Raises:
        ValueError: a rate is not in [0, 1], or larger than the one before; or there is none.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates:
            raise ValueError(f"{OPTION} has no rates; give some, such as 0.8,0.6,0.45")
        for rate in self.rates:
            check_range(OPTION, rate, 0.0, 1.0)
        for before, rate in itertools.pairwise(self.rates):
            if rate > before:
                raise ValueError(
                    f"{OPTION}: {rate} after {before}. Each rate is that of all draft tokens up to "
                    "a position, so that none is larger than the one before. For rates that are "
                    "conditional on the token before, multiply: 0.8,0.75 becomes 0.8,0.6."
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The rates in a text such as ``0.8,0.6,0.45``; a ValueError for others."""
        try:
            rates = tuple(float(part) for part in text.split(","))
        except ValueError as error:
            raise ValueError(
                f"{OPTION} {text!r}: must be numbers from 0 to 1 with commas, such as 0.8,0.6,0.45"
            ) from error
        return cls(rates)

    def __str__(self) -> str:
        return ", ".join(f"{rate:g}" for rate in self.rates)

    @property
    def conditional(self) -> list[float]:
        """By position, the probability given that all draft tokens before are accepted."""
        return [
            rate / before if before else 0.0
            for before, rate in itertools.pairwise((1.0, *self.rates))
        ]

    @contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Within the block, calls on the model accept at these rates, with random numbers by
        PyTorch's seed. What the model's strategies had learned is forgotten, before and after."""
        forget(model)
        memory(model)[Acceptance] = partial(SyntheticAcceptance, self.conditional)
        try:
            yield
        finally:
            del memory(model)[Acceptance]
            forget(model)


class SyntheticAcceptance(Acceptance):
    """Accepts the first child of a node at its depth's rate, and no other child.

    The token behind what is accepted is the model's, greedy or sampled.

    Args:
        rates: by depth from 1, given that the parent is accepted; 0 for deeper nodes.

    Raises:
        ValueError: the call has a rule of its own, or a processor that keeps a state.
    """

    def __init__(
        self, rates: Sequence[float], config: GenerationConfig, options: DraftOptions,
        scorer: Scorer, seeds: Sequence[int] | None = None,
    ):  # fmt: skip
        if options.acceptance != "match":
            raise ValueError(
                f"acceptance={options.acceptance!r} with {OPTION}, which is a rule itself: leave "
                "one of the two out."
            )
        if scorer.stateful:
            raise ValueError(
                f"the logits processor {scorer.stateful[0]} with {OPTION}: it keeps a state, and "
                "would see tokens that the model does not choose. Leave one of the two out."
            )
        super().__init__(config, options, scorer, seeds)
        self._rates = [1.0, *rates]  # the root is certain
        self._random: torch.Generator | None = None

    def program(self, tree: Tree, recorded: bool = False, ahead: int = 0) -> VerifyProgram | None:
        if tree.num_tokens == 1:
            return super().program(tree, recorded, ahead)
        trivial = self.scorer.trivial and not self.do_sample
        known = trivial or (recorded and self.scorer.key is not None)
        return self._rule(tree, ahead) if known else None

    def __call__(
        self, tree: Tree, logits: Tensor, unfinished: list[bool], ragged: Ragged | None = None
    ) -> StepResult:
        if tree.num_tokens == 1:
            return super().__call__(tree, logits, unfinished)
        rule = self._rule(tree, 0)
        if ragged is not None:
            logits = ragged.pad(logits)
        return rule.function(tree, logits, rule.inputs)

    def _rule(self, tree: Tree, ahead: int) -> VerifyProgram:
        """The rule as a program, whose random numbers are drawn before it runs."""
        noise, width = self.noise, bucket(tree.max_depth + 1 + ahead)

        def accept(tree: Tree, logits: Tensor, inputs: Sequence[Tensor]) -> StepResult:
            *given, hits = inputs
            return accept_at(tree, self.targets(tree.drafted, logits, given), hits)

        key = "synthetic", self.scorer.key, None if noise is None else tuple(noise.temperatures)
        later = None if noise is None else self.ahead
        return VerifyProgram(key, accept, [*self.inputs(width), self._hits(tree, width)], later)

    def _hits(self, tree: Tree, width: int) -> Tensor:
        """Whether a first child is accepted, by row and depth: ``(batch, width)`` bool."""
        device = tree.device
        if self._random is None:
            self._random = torch.Generator(device).manual_seed(torch.initial_seed())
        rates = [*self._rates, *[0.0] * width][:width]
        numbers = torch.rand(tree.batch_size, width, generator=self._random, device=device)
        return numbers < to_device(rates, device)


def accept_at(tree: Tree, targets: Tensor, hits: Tensor) -> StepResult:
    """Accept first children, as far as they hit.

    Args:
        tree: the draft tree of each row.
        targets: ``(batch, tokens)`` the target's token after each node that has one.
        hits: ``(batch, depths)`` bool
    """
    drafted = tree.drafted
    nodes, parents = drafted.num_nodes, drafted.parents.clamp(min=0)
    earlier = torch.ones(nodes, nodes, dtype=torch.bool, device=parents.device).tril(-1)
    earlier[:, 0] = False
    siblings = (parents[:, :, None] == parents[:, None, :]) & drafted.valid[:, None, :]
    taken = drafted.valid & ~(siblings & earlier).any(-1) & hits.gather(1, drafted.depths)
    taken[:, 0] = False
    # Their parents emit them, as if the target had chosen so; the last column is discarded.
    places = torch.where(taken, parents, nodes)
    targets = pad(targets, (0, 1)).scatter(1, places, drafted.tokens)[:, :nodes]
    taken[:, 0] = True
    return verify.match(tree.changed(valid=pad(taken, (0, tree.num_nodes - nodes))), targets)
