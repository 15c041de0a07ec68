"""Measures strategies against plain ``generate``; knows no files, tables or terminals.

All contenders generate each batch of prompts one after the other, in an order that rotates from
batch to batch, so that changes in the machine's speed affect all alike. Comparing outputs is not
timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_spec.bench import report
from hf_spec.bench.agreement import Agreement, classify
from hf_spec.bench.contenders import (
    PLAIN,
    Contender,
    contenders,
    parse_names,
    with_compiled,
    with_joining,
)
from hf_spec.bench.prompts import Prompt, batches, encode_prompts
from hf_spec.bench.session import Session
from hf_spec.core.stats import SpecStats

#: Category of measurements over all categories together.
ALL_CATEGORIES = "mixed"


@dataclass
class Measurement:
    """One contender on one batch: a call of ``generate``, or several that are counted together.

    Attributes:
        strategy: name of the contender.
        batch_size: the nominal batch size; a category's last batch may be smaller.
        prompts: indices of the prompts.
        category: their category.
        seconds: wall-clock time of the call.
        rows: the new tokens of each sequence, up to and including the first EOS.
        row_steps: forward passes of the model, counted once per unfinished sequence.
        stats: statistics of the call; None for stock contenders.
        agreement: one per sequence; None if outputs cannot be compared, as under sampling.
        baseline: name of the plain contender that speed and output are compared with.
    """

    strategy: str
    batch_size: int
    prompts: list[int]
    category: str
    seconds: float
    rows: list[list[int]]
    row_steps: int
    stats: SpecStats | None = None
    agreement: list[Agreement] | None = None
    baseline: str = PLAIN.name

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.rows))


@dataclass
class BenchResult:
    """All measurements of a run.

    Attributes:
        prompts: the prompts that were asked for.
        contenders: the contenders.
        settings: the settings, as JSON types.
        measurements: one per batch and contender.
        notes: remarks for the reader of the results.
        truncated_prompts: number of prompts that were cut to fit the context.
        interrupted: whether the run was interrupted.
    """

    prompts: list[Prompt]
    contenders: list[Contender]
    settings: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    truncated_prompts: int = 0
    interrupted: bool = False

    def runs(self) -> list[dict[str, Any]]:
        """One entry per batch size, strategy and task; see :func:`hf_spec.bench.report.rows`."""
        return report.rows(self.measurements)

    def overall(self, strategy: str, batch_size: int | None = None) -> dict[str, Any]:
        """The entry of a strategy over all tasks.

        Args:
            strategy: name of the contender.
            batch_size: the batch size; None for the first one.

        Raises:
            KeyError: there is no such measurement.
        """
        for row in self.runs():
            wanted = batch_size in (None, row["batch_size"])
            if wanted and (row["strategy"], row["task"]) == (strategy, report.ALL):
                return row
        raise KeyError(f"no measurement of {strategy!r} with batch size {batch_size}")


def run(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    strategies: Sequence[str | Contender],
    *,
    batch_sizes: Sequence[int] = (1,),
    max_new_tokens: int = 128,
    strategy_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    generate_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    warmup: bool = True,
    compiled: str | None = None,
    throughput: bool = False,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> BenchResult:
    """Generate with plain decoding and every strategy, and compare.

    On ``KeyboardInterrupt``, the batches that all contenders have finished are returned, and
    ``interrupted`` is set.

    Args:
        model: a causal language model in evaluation mode, on its device.
        tokenizer: its tokenizer.
        prompts: see :func:`hf_spec.bench.prompts.read_prompts`.
        strategies: names, or contenders from :func:`hf_spec.bench.contenders.contenders`.
        batch_sizes: the benchmark runs once for each.
        max_new_tokens: limit for each prompt, from 1.
        strategy_kwargs: options by strategy name, for strategies given as names.
        generate_kwargs: passed to every ``generate``, plain ones included; greedy unless
            ``do_sample`` is among them.
        seed: seed for the sampling of the first batch; the next batches count up from it. All
            contenders start a batch with the same seed.
        warmup: whether each contender makes a short call first, which is not measured.
        compiled: a backend of ``torch.compile``, with which contenders take part a second time,
            with a static cache and compiled steps; None for none. Calls that compile are repeated
            and counted apart.
        throughput: whether all prompts make up one measurement per batch size; strategies then take
            part a second time, with prompts that join a running batch.
        progress: called as ``progress(done, total)`` with numbers of calls.

    Raises:
        ValueError: a strategy is unknown, or does not support this model or these options.
    """
    if not prompts:
        raise ValueError("nothing to measure: no prompts")
    if not batch_sizes or min(batch_sizes) < 1 or max_new_tokens < 1:
        raise ValueError("batch sizes and max_new_tokens must be at least 1")
    names = parse_names([item for item in strategies if isinstance(item, str)])
    made = contenders(names, strategy_kwargs)
    lineup = [PLAIN, *made, *(item for item in strategies if isinstance(item, Contender))]
    options = {"do_sample": False, **(generate_kwargs or {}), "max_new_tokens": max_new_tokens}
    token_ids, truncated = encode_prompts(model, tokenizer, prompts, max_new_tokens)
    if compiled:
        lineup = with_compiled(lineup, compiled, max(map(len, token_ids)) + max_new_tokens)
    if throughput:
        lineup = with_joining(lineup)
    settings = {
        **options,
        "batch_sizes": list(batch_sizes),
        "seed": seed,
        "strategies": {item.name: _plain_options(item) for item in lineup},
    }
    result = BenchResult(list(prompts), lineup, settings, truncated_prompts=truncated)
    if result.truncated_prompts:
        result.notes.append(
            f"{result.truncated_prompts} of {len(prompts)} prompts did not fit the model's context "
            "and were cut at their beginning"
        )

    plan = []
    for size in batch_sizes:
        taking_part = [item for item in lineup if size == 1 or not item.single_row]
        for item in lineup:
            if item not in taking_part:
                result.notes.append(f"{item.name} left out at batch size {size}: it takes one row")
        if throughput:
            plan.append((size, taking_part, list(range(len(prompts)))))
            continue
        parts = list(batches(prompts, size))
        small = sum(len(part) < size for part in parts)
        if small:
            result.notes.append(
                f"{small} of {len(parts)} batches have fewer than {size} rows: a batch never mixes "
                "categories"
            )
        plan += [(size, taking_part, part) for part in parts]
    calls, done = sum(len(taking_part) for _, taking_part, _ in plan), 0

    with Session.open(model, tokenizer, options, lineup) as session:
        try:
            if warmup:
                session.warm_up(plan, token_ids)
            for turn, (size, taking_part, indices) in enumerate(plan):
                outcome: dict[str, Measurement] = {}
                start = turn % len(taking_part)
                for item in taking_part[start:] + taking_part[:start]:
                    torch.manual_seed(seed + turn)
                    made_by = session.stream(item, [token_ids[index] for index in indices], size)
                    category = ALL_CATEGORIES if throughput else prompts[indices[0]].category
                    outcome[item.name] = Measurement(
                        item.name, size, indices, category, *made_by, baseline=item.baseline
                    )
                    done += 1
                    progress(done, calls)
                if not options["do_sample"]:
                    _compare(session, outcome, token_ids, taking_part)
                result.measurements += [outcome[item.name] for item in taking_part]
            result.notes += [
                f"{name} compiled in {count} calls of {seconds:.0f} seconds in all, which are "
                "left out"
                for name, (count, seconds) in session.compiling.items()
            ]
            result.notes += [
                f"{name} ran with its update beside the weights: {reason}"
                for name, reason in session.unmerged.items()
            ]
        except KeyboardInterrupt:
            result.interrupted = True
            result.notes.append(f"interrupted after {done} of {calls} calls")
    return result


def _plain_options(contender: Contender) -> dict[str, Any]:
    """A contender's keyword arguments of JSON types; models and tokenizers are left out."""
    allowed = (str, int, float, bool, list, dict, type(None))
    return {key: value for key, value in contender.kwargs.items() if isinstance(value, allowed)}


def _compare(
    session: Session,
    outcome: Mapping[str, Measurement],
    token_ids: Sequence[list[int]],
    lineup: Sequence[Contender],
) -> None:
    """Set the ``agreement`` of every measurement with its baseline."""
    default = session.model.generation_config.repetition_penalty
    penalty = session.options.get("repetition_penalty", default)
    plains = {item.name: item for item in lineup if item.name == item.baseline}
    for item in sorted(outcome.values(), key=lambda item: item.baseline):
        session.activate(plains[item.baseline])
        plain = outcome[item.baseline]
        item.agreement = [
            classify(session.model, token_ids[index], ours, theirs, penalty)
            for index, ours, theirs in zip(item.prompts, item.rows, plain.rows)
        ]
