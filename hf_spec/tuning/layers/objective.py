"""The value of a choice of sublayers: its time per token relative to plain decoding.

``modelled`` combines stored costs with the actual steps of decoding, which are reproducible;
``measured`` takes wall-clock time, in turns with plain decoding. This module knows models, prompts
and costs, but no optimiser or files.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from hf_spec.bench.contenders import PLAIN, Contender, ours
from hf_spec.bench.prompts import Prompt, context_limit, encode_prompts
from hf_spec.bench.session import Session, own_generation_config
from hf_spec.core.memory import forget
from hf_spec.core.stats import SpecStats
from hf_spec.tuning.layers.costs import ForwardTimer, Skip, StepCosts, Sublayers

OBJECTIVES = ("modelled", "measured")
STRATEGY = "layer_skip"
#: Prompts decoded to measure costs, most rounds, fewest rounds if time runs out, and forwards of
#: each kind per round.
TIMED_PROMPTS, ROUNDS, FEWEST_ROUNDS, FORWARDS = 4, 5, 2, 4
#: Seconds after which no further round starts.
PATIENCE = 60.0
#: Draft length of the calls that calibrate the work outside of forwards.
CALIBRATION_DRAFT = 4


@dataclass(frozen=True)
class Exit:
    """When drafting stops (Draft & Verify, section 3.4; tables 3 and 4 compare settings).

    Attributes:
        draft_exit: ``adaptive``, ``threshold`` or ``fixed``.
        max_draft: K, most tokens drafted per step.
        threshold: gamma, the probability below which drafting stops.
        target_acceptance: alpha, the acceptance rate that the adaptive threshold aims at.
    """

    draft_exit: str = "adaptive"
    max_draft: int = 12
    threshold: float = 0.6
    target_acceptance: float = 0.85

    def options(self) -> dict[str, Any]:
        """The setting as ``assistant_kwargs``, without options that its mode does not use."""
        used = {"draft_exit": self.draft_exit, "max_draft": self.max_draft}
        if self.draft_exit != "fixed":
            used["threshold"] = self.threshold
        if self.draft_exit == "adaptive":
            used["target_acceptance"] = self.target_acceptance
        return used


@dataclass(frozen=True)
class Counts:
    """Counts from decoding prompts; they do not depend on the machine's speed.

    Attributes:
        prompts: prompts decoded, each with a prefill.
        tokens: emitted tokens.
        steps: forwards of the full model, prefills included.
        drafted, accepted: candidates proposed and accepted.
        draft_forwards: forwards of the drafting model.
        draft_lengths: ``{d: n}``: n steps verified a draft of d tokens.
    """

    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_forwards: int = 0
    draft_lengths: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stats: SpecStats, prompts: int = 1) -> Counts:
        """Counts of calls that decoded this number of prompts, one per call."""
        # Steps with a draft of d tokens or more; a prefill has none.
        reached = {0: stats.num_row_steps - prompts, **stats.offered}
        lengths = {d: n - reached.get(d + 1, 0) for d, n in sorted(reached.items())}
        return cls(
            prompts, stats.num_generated_tokens, stats.num_row_steps, sum(stats.offered.values()),
            sum(stats.accepted.values()), stats.num_draft_forwards,
            {d: n for d, n in lengths.items() if n},
        )  # fmt: skip

    @property
    def tau(self) -> float:
        """Emitted tokens per forward of the full model."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted: AR of Draft & Verify."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Counts:
        """From what JSON makes of the fields."""
        lengths = {int(depth): count for depth, count in data["draft_lengths"].items()}
        return cls(**{**data, "draft_lengths": lengths})


@dataclass(frozen=True)
class Evaluation:
    """The value of a choice: its time per token divided by that of plain decoding (the lower, the
    better)."""

    value: float
    counts: Counts

    def to_dict(self) -> dict[str, Any]:
        """All fields and the figures derived from them, as JSON types."""
        return {
            "value": self.value,
            "speedup": 1.0 / self.value if self.value else 0.0,
            "tau": self.counts.tau,
            "acceptance": self.counts.acceptance,
            "counts": asdict(self.counts),
        }


def modelled_seconds(costs: StepCosts, counts: Counts, skip: Skip) -> float:
    """Seconds that these steps cost: prefills, drafting forwards, verifying forwards."""
    verifying = sum(
        count * (costs.verify_seconds(1 + depth) + costs.step_overhead)
        for depth, count in counts.draft_lengths.items()
    )
    drafting = counts.draft_forwards * (costs.draft_seconds(skip) + costs.draft_overhead)
    return counts.prompts * costs.prefill + drafting + verifying


def plain_seconds(costs: StepCosts, counts: Counts) -> float:
    """Seconds that plain decoding needs for as many tokens of as many prompts."""
    return counts.prompts * costs.prefill + (counts.tokens - counts.prompts) * costs.plain


def modelled_value(costs: StepCosts, counts: Counts, skip: Skip) -> float:
    """Modelled seconds per token, divided by those of plain decoding."""
    return modelled_seconds(costs, counts, skip) / plain_seconds(costs, counts)


class Evaluator:
    """Evaluates choices of sublayers on a model and development prompts.

    Args:
        model: a causal language model in evaluation mode, on its device.
        prompts: development prompts, decoded one by one in this order.
        max_new_tokens: limit for each prompt.
        sampling: ``do_sample`` and its options; greedy if empty.
        seed: seed of the sampling; each prompt has its own, the same in every trial.

    Raises:
        ValueError: the prompts do not fit the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        sampling: dict[str, Any] | None = None,
        seed: int = 0,
    ):
        if not prompts:
            raise ValueError("nothing to search on: no prompts")
        self.ids, _ = encode_prompts(model, tokenizer, prompts, max_new_tokens)
        self.model = model
        self.tokenizer = tokenizer
        self.sublayers = Sublayers.of(model)
        self.seed = seed
        options = {"do_sample": False, **(sampling or {}), "max_new_tokens": max_new_tokens}
        self.session = Session(model, options, managed=False)
        self.costs: StepCosts | None = None

    def own_defaults(self) -> AbstractContextManager[None]:
        """Within the block, the model's generation config fits the sampling, with no strategy."""
        greedy = not self.session.options["do_sample"]
        return own_generation_config(self.model, self.tokenizer, greedy=greedy)

    # -- decoding ----------------------------------------------------------------------------

    def decode(
        self, prompt: int, contender: Contender = PLAIN, **overrides: Any
    ) -> tuple[float, list[int], SpecStats | None]:
        """Seconds, new tokens and statistics (None for plain decoding) of one prompt."""
        torch.manual_seed(self.seed + prompt)
        seconds, rows, _, stats = self.session.generate(contender, [self.ids[prompt]], **overrides)
        return seconds, rows[0], stats

    def speculate(self, prompt: int, skip: Skip, stop: Exit) -> tuple[float, SpecStats]:
        """Seconds and statistics of one prompt decoded with these sublayers skipped."""
        # Every step drafts; otherwise bad choices would look like plain decoding.
        options = {**skip.options(), **stop.options(), "fallback": False}
        seconds, _, stats = self.decode(prompt, Contender(STRATEGY, ours(STRATEGY, options)))
        assert stats is not None
        return seconds, stats

    # -- judging -----------------------------------------------------------------------------

    def evaluate(self, objective: str, skip: Skip, stop: Exit) -> Iterator[Evaluation]:
        """The value over the first prompt, the first two, ..., all of them."""
        forget(self.model)  # a choice's value must not depend on earlier trials
        with self.own_defaults():
            judge = self._modelled if objective == "modelled" else self._measured
            yield from judge(skip, stop)

    def _modelled(self, skip: Skip, stop: Exit) -> Iterator[Evaluation]:
        if self.costs is None:
            raise RuntimeError("costs are not measured yet")
        total = SpecStats()
        for prompt in range(len(self.ids)):
            total.merge(self.speculate(prompt, skip, stop)[1])
            counts = Counts.of(total, prompt + 1)
            yield Evaluation(modelled_value(self.costs, counts, skip), counts)

    def _measured(self, skip: Skip, stop: Exit) -> Iterator[Evaluation]:
        total, seconds, plain, plain_tokens = SpecStats(), 0.0, 0.0, 0
        for prompt in range(len(self.ids)):
            for speculative in (True, False) if prompt % 2 else (False, True):
                if speculative:
                    spent, stats = self.speculate(prompt, skip, stop)
                    seconds += spent
                    total.merge(stats)
                else:
                    spent, tokens, _ = self.decode(prompt)
                    plain, plain_tokens = plain + spent, plain_tokens + len(tokens)
            counts = Counts.of(total, prompt + 1)
            yield Evaluation((seconds / counts.tokens) / (plain / plain_tokens), counts)

    # -- costs -------------------------------------------------------------------------------

    def measure_costs(self, max_draft: int) -> StepCosts:
        """Measure the costs for :func:`modelled_value`; forwards run at a typical context length.

        Raises:
            ValueError: the model ends all prompts with their first token.
        """
        with self.own_defaults():
            return self._measure_costs(max_draft)

    def _measure_costs(self, max_draft: int) -> StepCosts:
        order = sorted(range(len(self.ids)), key=lambda index: len(self.ids[index]))
        ways = len(order) / TIMED_PROMPTS
        timed = sorted({order[int(ways * (i + 0.5))] for i in range(TIMED_PROMPTS)})
        middle = order[len(order) // 2]
        answer = self.decode(middle)[1]
        context = [*self.ids[middle], *answer[: len(answer) // 2]]
        limit = context_limit(self.model, self.tokenizer)
        if limit is not None:
            context = context[: max(1, limit - max_draft - 1)]
        timer = ForwardTimer(self.model, context, max_draft + 1, self.sublayers)
        nothing = Exit("fixed", min(max_draft, CALIBRATION_DRAFT))
        prefills, plains, drafts, steps = [], [], [], []
        begin = time.perf_counter()
        # In turns, so that drift of the machine affects everything alike.
        for turn in range(ROUNDS):
            if turn >= FEWEST_ROUNDS and time.perf_counter() - begin > PATIENCE:
                break
            for prompt in timed:
                one, *_ = self.decode(prompt, max_new_tokens=1)
                seconds, tokens, _ = self.decode(prompt)
                prefills.append(one)
                if len(tokens) > 1:
                    plains.append((seconds - one) / (len(tokens) - 1))
                stats = self.speculate(prompt, Skip(), nothing)[1]
                if stats.num_draft_forwards:
                    drafts.append(stats.draft_seconds / stats.num_draft_forwards)
                steps.append((stats.verify_seconds + stats.other_seconds) / stats.num_steps)
            for _ in range(FORWARDS):
                timer.round()
        if not plains:
            raise ValueError(
                "the model ends every development prompt with its first token: there is nothing "
                "to speed up; give other prompts"
            )
        forwards = timer.result()
        whole = forwards.measured["draft"][0]["seconds"]  # a drafting forward with nothing left out
        return replace(
            forwards,
            draft_overhead=max(statistics.median(drafts) - whole, 0.0) if drafts else 0.0,
            step_overhead=statistics.median(steps), prefill=statistics.median(prefills),
            plain=max(statistics.median(plains), 1e-9), context=len(context),
        )  # fmt: skip
