"""The value of a choice of sublayers: its time per token relative to plain decoding.

It combines stored costs with the actual steps of decoding, and so is reproducible. This module
knows models, prompts and costs, but no optimiser or files.
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
from hf_spec.core.checks import check_count
from hf_spec.core.stats import SpecStats
from hf_spec.policy.memory import forget
from hf_spec.tuning.layers.costs import ForwardTimer, Skip, StepCosts, Sublayers

STRATEGY = "layer_skip"
#: Prompts decoded to measure costs, most rounds, fewest rounds if time runs out, and forwards of
#: each kind per round.
TIMED_PROMPTS, ROUNDS, FEWEST_ROUNDS, FORWARDS = 4, 5, 2, 4
#: Seconds after which no further round starts.
PATIENCE = 60.0
#: Draft length of the calls that calibrate the work outside of forwards.
CALIBRATION_DRAFT = 4


@dataclass(frozen=True)
class Settings:
    """What a search optimises; a study can only be continued with the same settings.

    Attributes:
        seed: seed of the search and of the sampling; each prompt has its own, the same in every
            trial.
        max_new_tokens: limit for each prompt.
        max_draft: K, most tokens drafted per step.
        do_sample, temperature, top_k, top_p: how tokens are sampled.

    Raises:
        ValueError: a field is invalid; the message names it.
    """

    seed: int = 0
    max_new_tokens: int = 64
    max_draft: int = 12
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens, low=2)
        check_count("max_draft", self.max_draft)

    @property
    def sampling(self) -> dict[str, Any]:
        """``do_sample`` and the sampling options that are set."""
        values = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        given = {name: value for name, value in values.items() if value is not None}
        return {"do_sample": self.do_sample, **given}


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

    Raises:
        ValueError: the prompts do not fit the model.
    """

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[Prompt], settings: Settings):
        if not prompts:
            raise ValueError("nothing to search on: no prompts")
        self.ids, _ = encode_prompts(model, tokenizer, prompts, settings.max_new_tokens)
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.sublayers = Sublayers.of(model)
        options = {**settings.sampling, "max_new_tokens": settings.max_new_tokens}
        self.session = Session(model, options, managed=False)
        self.costs: StepCosts | None = None

    def own_defaults(self) -> AbstractContextManager[None]:
        """Within the block, the model's generation config fits the sampling, with no strategy."""
        greedy = not self.settings.do_sample
        return own_generation_config(self.model, self.tokenizer, greedy=greedy)

    # -- decoding ----------------------------------------------------------------------------

    def decode(
        self, prompt: int, contender: Contender = PLAIN, **overrides: Any
    ) -> tuple[float, list[int], SpecStats | None]:
        """Seconds, new tokens and statistics (None for plain decoding) of one prompt."""
        torch.manual_seed(self.settings.seed + prompt)
        seconds, rows, _, stats = self.session.generate(contender, [self.ids[prompt]], **overrides)
        return seconds, rows[0], stats

    def speculate(self, prompt: int, skip: Skip, max_draft: int, draft_exit: str) -> SpecStats:
        """Statistics of one prompt decoded with these sublayers skipped."""
        # Every step drafts; otherwise bad choices would look like plain decoding.
        drafting = {"draft_exit": draft_exit, "max_draft": max_draft, "fallback": False}
        options = ours(STRATEGY, {**skip.options(), **drafting})
        stats = self.decode(prompt, Contender(STRATEGY, options))[2]
        assert stats is not None
        return stats

    # -- judging -----------------------------------------------------------------------------

    def evaluate(self, skip: Skip) -> Iterator[Evaluation]:
        """The value over the first prompt, the first two, ..., all of them."""
        if self.costs is None:
            raise RuntimeError("costs are not measured yet")
        forget(self.model)  # a choice's value must not depend on earlier trials
        total = SpecStats()
        with self.own_defaults():
            for prompt in range(len(self.ids)):
                # The paper's exit, as the default one depends on step times.
                total.merge(self.speculate(prompt, skip, self.settings.max_draft, "adaptive"))
                counts = Counts.of(total, prompt + 1)
                yield Evaluation(modelled_value(self.costs, counts, skip), counts)

    # -- costs -------------------------------------------------------------------------------

    def measure_costs(self) -> StepCosts:
        """Measure the costs for :func:`modelled_value`; forwards run at a typical context length.

        Raises:
            ValueError: the model ends all prompts with their first token.
        """
        with self.own_defaults():
            return self._measure_costs()

    def _measure_costs(self) -> StepCosts:
        max_draft = self.settings.max_draft
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
                short = min(max_draft, CALIBRATION_DRAFT)
                stats = self.speculate(prompt, Skip(), short, "fixed")
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
