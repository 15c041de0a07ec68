"""Turns a draft and the model's logits into accepted tokens, by the chosen acceptance rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_spec.core import verify
from hf_spec.core.verify import Accepted
from hf_spec.drafting.drafter import Draft, Process
from hf_spec.drafting.noise import SamplingNoise
from hf_spec.drafting.options import StrategyOptions


@dataclass
class Choice:
    """The accepted tokens of a step, on the host.

    Attributes:
        path: ``(batch, depth + 1)`` accepted nodes, as a tensor for the cache.
        nodes: accepted nodes per row, the root first.
        tokens: emitted tokens per row, as many as accepted nodes.
        scores, logits: ``(vocab,)`` float32 per emitted token and row, if they are recorded.
    """

    path: Tensor
    nodes: list[list[int]]
    tokens: list[list[int]]
    scores: list[list[Tensor]]
    logits: list[list[Tensor]]


@dataclass
class Decision:
    """The accepted tokens of a step, on the device.

    Attributes:
        accepted: paths and tokens.
        active: unfinished rows.
        recorded: scores and logits of emitted tokens, if they are recorded.
    """

    accepted: Accepted
    active: list[bool]
    recorded: _Target | None = None

    def on_host(self, ahead: Tensor | None = None) -> tuple[Choice, Any]:
        """Copy the decision to the host in a single transfer.

        Args:
            ahead: ``(batch, n)`` float32 numbers to transfer along with it.

        Returns:
            What was accepted, and ``ahead`` as a NumPy array on the host.
        """
        accepted, depth = self.accepted, self.accepted.path.shape[1]
        packed = torch.cat([accepted.counts[:, None], accepted.path, accepted.tokens], 1)
        numbers = None
        if ahead is None:
            rows = packed.tolist()
        else:  # float32 represents integers below 2 ** 24, and so all tokens, exactly
            both = torch.cat([packed.to(ahead), ahead], 1).cpu().numpy()
            numbers = both[:, packed.shape[1] :]
            rows = both[:, : packed.shape[1]].astype(int).tolist()
        counts = [row[0] for row in rows]
        nodes = [row[1 : 1 + count] for row, count in zip(rows, counts)]
        tokens = [row[1 + depth : 1 + depth + count] for row, count in zip(rows, counts)]
        scores: list[list[Tensor]] = [[] for _ in rows]
        logits: list[list[Tensor]] = [[] for _ in rows]
        if self.recorded is not None:
            for row, path in enumerate(nodes):
                if self.active[row]:
                    seen = [self.recorded.seen[row, node] for node in path]
                    logits[row] = [one for one, _ in seen]
                    scores[row] = [one for _, one in seen]
        return Choice(accepted.path, nodes, tokens, scores, logits), numbers


def noise_of(
    config: GenerationConfig, options: StrategyOptions, batch_size: int, device: torch.device
) -> SamplingNoise | None:  # fmt: skip
    """What a call's tokens are sampled with, for drafters to see.

    None if nothing is sampled, or if the rule of acceptance makes the output depend on the drafts.
    """
    if not config.do_sample or options.acceptance != "match":
        return None
    return SamplingNoise(batch_size, device, config.temperature or 1.0)


class Chooser:
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
        self, options: StrategyOptions, scorer: Process, do_sample: bool, record: bool,
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

    def matches(self, draft: Draft) -> bool:
        """Whether the match rule applies to unprocessed logits: greedy decoding by argmax."""
        known = self.scorer.trivial and not self.do_sample and not self.record
        return known and draft.distributions is None and self.options.acceptance != "typical"

    def accept(self, draft: Draft, logits: Tensor, active: list[bool]) -> Decision:
        """Choose the accepted path of every row.

        Args:
            draft: the candidates.
            logits: ``(batch, nodes, vocab)`` from the model.
            active: unfinished rows.
        """
        if self.matches(draft):
            accepted = verify.match(draft.tree, draft.tokens, logits.argmax(-1))
            return Decision(accepted, active)
        typical, q = self.options.acceptance == "typical", draft.distributions
        stateful = bool(self.scorer.stateful)
        if stateful and self.scorer.eos:
            draft = _without(draft, self.scorer.eos)
        target = _Target(self.scorer, draft, logits, active, self.record)

        def select(scores: Tensor, depth: int) -> Tensor:
            return self._select(scores, depth, target.alive)

        if typical:
            accepted = verify.typical(
                draft.tree, draft.tokens, target, select,
                self.options.typical_epsilon, self.options.typical_delta,
            )  # fmt: skip
        elif q is not None and not stateful:
            accepted = verify.rejection(draft.tree, draft.tokens, q, target)
        else:  # also for rejection: equivalent for a greedy target, and exact for sampled drafts
            together = torch.tensor(active, device=logits.device) if self.scorer.lockstep else None
            accepted = verify.match_along(draft.tree, draft.tokens, target, select, together)
            if self.noise is not None:
                counts = zip(accepted.counts.tolist(), active)
                self.noise.advance([count if on else 0 for count, on in counts])
        return Decision(accepted, active, target if self.record else None)

    def _select(self, scores: Tensor, depth: int, alive: Sequence[bool]) -> Tensor:
        if not self.do_sample:
            return scores.argmax(-1)
        if self.noise is None:
            return torch.multinomial(scores.softmax(-1), 1)[:, 0]
        rows = [row for row, one in enumerate(alive) if one]
        return self.noise.choose(scores, depth, rows)


def _without(draft: Draft, tokens: Collection[int]) -> Draft:
    """The draft without candidates of these tokens.

    Plain generation calls no processor for a row that has ended. The end itself is still emitted,
    as the token after its parent.
    """
    ends = torch.tensor(list(tokens), device=draft.tokens.device)
    valid = draft.tree.valid & ~torch.isin(draft.tokens, ends).to(draft.tree.valid.device)
    return dataclasses.replace(draft, tree=dataclasses.replace(draft.tree, valid=valid))


class _Target:
    """Processed scores at one node per row; see ``verify.ScoreFn``."""

    def __init__(
        self, scorer: Process, draft: Draft, logits: Tensor, active: list[bool], record: bool
    ):
        self.scorer = scorer
        self.logits = logits
        self.active = active
        self.draft = draft
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
        return self.draft.tokens.tolist(), self.draft.tree.parents.tolist()

    def _suffix(self, row: int, node: int) -> list[int]:
        """Tokens from below the root down to the node."""
        tokens, parents = self._host
        path = []
        while node > 0:
            path.append(tokens[row][node])
            node = parents[row][node]
        return path[::-1]
