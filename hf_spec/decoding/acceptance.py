"""Turns draft trees and the model's logits into accepted tokens, by the chosen rule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_spec.core import verify
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.drafting.noise import SamplingNoise
from hf_spec.drafting.options import DraftOptions
from hf_spec.drafting.state import Process


def noise_of(
    config: GenerationConfig, options: DraftOptions, batch_size: int, device: torch.device
) -> SamplingNoise | None:  # fmt: skip
    """What a call's tokens are sampled with, for drafters to see.

    None if nothing is sampled, or if the rule of acceptance makes the output depend on the drafts.
    """
    if not config.do_sample or options.acceptance != "match":
        return None
    return SamplingNoise(batch_size, device, config.temperature or 1.0)


class Acceptance:
    """Applies an acceptance rule under a call's logits processors.

    Args:
        options: the options that name the rule.
        scorer: the call's logits processors.
        do_sample: sample the target's tokens instead of taking the argmax.
        record: keep scores and logits of emitted tokens.
        noise: what tokens are sampled with, if they are accepted by the match rule.

    Raises:
        ValueError: if the rule asks for scores of several continuations, and a processor keeps a
            state.
    """

    def __init__(
        self, options: DraftOptions, scorer: Process, do_sample: bool, record: bool,
        noise: SamplingNoise | None = None,
    ):  # fmt: skip
        if options.acceptance == "typical" and scorer.stateful:
            raise ValueError(
                f"acceptance='typical' with the logits processor {scorer.stateful[0]}: typical "
                "acceptance scores several continuations of a prefix, which a processor that keeps "
                "a state cannot. Choose acceptance='match'; or, if its result depends on its "
                "arguments alone, set its attribute stateless = True."
            )
        self.options = options
        self.scorer = scorer
        self.do_sample = do_sample
        self.record = record
        self.noise = noise
        self._target: _Target | None = None

    def matches(self, tree: Tree) -> bool:
        """Whether the match rule applies to unprocessed logits: greedy decoding by argmax."""
        known = self.scorer.trivial and not self.do_sample and not self.record
        return known and tree.q is None and self.options.acceptance != "typical"

    def __call__(self, tree: Tree, logits: Tensor, active: list[bool]) -> StepResult:
        """Choose the accepted path of every row.

        Args:
            tree: the draft trees.
            logits: ``(batch, tokens, vocab)`` from the model.
            active: unfinished rows.
        """
        if self.matches(tree):
            return verify.match(tree, logits.argmax(-1))
        stateful = bool(self.scorer.stateful)
        if stateful and self.scorer.eos:
            # Plain generation calls no processor for a row that has ended. The end itself is still
            # emitted, as the token after its parent.
            tree = tree.without(list(self.scorer.eos))
        self._target = target = _Target(self.scorer, tree.drafted, logits, active, self.record)

        def select(scores: Tensor, depth: int) -> Tensor:
            return self._select(scores, depth, target.alive)

        if self.options.acceptance == "typical":
            epsilon, delta = self.options.typical_epsilon, self.options.typical_delta
            return verify.typical(tree, target, select, epsilon, delta)
        if tree.q is not None and not stateful:
            return verify.rejection(tree, target)
        # Also for rejection: equivalent for a greedy target, and exact for sampled drafts.
        together = torch.tensor(active, device=logits.device) if self.scorer.lockstep else None
        result = verify.match_along(tree, target, select, together)
        if self.noise is not None:
            counts = zip(result.counts.tolist(), active)
            self.noise.advance([count if on else 0 for count, on in counts])
        return result

    def recorded(self, row: int, path: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Scores and logits ``(vocab,)`` float32 of the last step's tokens, if they are recorded.

        Args:
            row: row of the batch.
            path: the nodes that the tokens follow.
        """
        if self._target is None or not self.record:
            return [], []
        logits, scores = zip(*(self._target.seen[row, node] for node in path))
        return list(scores), list(logits)

    def _select(self, scores: Tensor, depth: int, alive: Sequence[bool]) -> Tensor:
        if not self.do_sample:
            return scores.argmax(-1)
        if self.noise is None:
            return torch.multinomial(scores.softmax(-1), 1)[:, 0]
        rows = [row for row, one in enumerate(alive) if one]
        return self.noise.choose(scores, depth, rows)


class _Target:
    """Processed scores at one node per row; see ``verify.ScoreFn``."""

    def __init__(
        self, scorer: Process, tree: Tree, logits: Tensor, active: list[bool], record: bool
    ):
        self.scorer = scorer
        self.logits = logits
        self.active = active
        self.tree = tree
        self.rows = torch.arange(len(active), device=logits.device)
        self.record = record
        self.seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        #: Rows whose scores are wanted.
        self.alive = active

    def __call__(self, nodes: Tensor, active: Tensor) -> Tensor:
        # A float32 copy, as in plain generation: processors may modify it.
        logits = self.logits[self.rows, nodes].to(torch.float32, copy=True)
        self.alive = alive = [one and on for one, on in zip(active.tolist(), self.active)]
        if self.scorer.trivial and not self.record:
            return logits
        at = nodes.tolist()
        suffixes = [self._suffix(row, node) if alive[row] else [] for row, node in enumerate(at)]
        raw = logits.clone() if self.record else logits
        scores = self.scorer(logits, suffixes, alive)
        if self.record:
            for row, node in enumerate(at):
                if alive[row]:
                    self.seen[row, node] = (raw[row], scores[row])
        return scores

    @cached_property
    def _host(self) -> tuple[list[list[int]], list[list[int]]]:
        return self.tree.tokens.tolist(), self.tree.parents.tolist()

    def _suffix(self, row: int, node: int) -> list[int]:
        """Tokens from below the root down to the node."""
        tokens, parents = self._host
        path = []
        while node > 0:
            path.append(tokens[row][node])
            node = parents[row][node]
        return path[::-1]
