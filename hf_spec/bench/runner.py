"""Measures strategies against plain ``generate``; knows no files, tables or terminals.

All contenders generate each batch of prompts one after the other, in an order that rotates from
batch to batch, so that changes in the machine's speed affect all alike. Comparing outputs is not
timed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters

import hf_spec
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
from hf_spec.core.checks import first_line
from hf_spec.core.stats import SpecStats, synchronize

#: New tokens of a warm-up call: several steps of every strategy.
WARMUP_TOKENS = 16
#: Most repetitions of a call that still compiles something, as the policy tries tree sizes.
MOST_COMPILING = 16
#: Category of measurements over all categories together.
ALL_CATEGORIES = "mixed"
#: Sampling fields of a model's generation config, which greedy runs clear.
SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip


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

    session = Session(model, options, any(item.adapters for item in lineup))
    greedy = not options["do_sample"]
    with own_generation_config(model, tokenizer, greedy), closing(session):
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
                if greedy:
                    session.compare(outcome, token_ids, taking_part)
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


@contextmanager
def own_generation_config(model: Any, tokenizer: Any, greedy: bool) -> Iterator[None]:
    """Within the block, the model's default generation config names no strategy and, if greedy, no
    sampling."""
    saved = model.generation_config
    config = copy.deepcopy(saved)
    for name in ("assistant_strategy", "assistant_kwargs", "prompt_lookup_num_tokens"):
        if getattr(config, name, None) is not None:
            setattr(config, name, None)
    if greedy:
        config.do_sample = False
        for name in SAMPLING_FIELDS:
            setattr(config, name, None)
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    if config.pad_token_id is None:
        config.pad_token_id = next(iter(_eos_ids(config)), 0)
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = saved


def _eos_ids(config: Any) -> list[int]:
    eos = config.eos_token_id
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)


@dataclass
class Session:
    """The model, and what all calls share.

    Attributes:
        model: the model.
        options: keyword arguments of every call.
        managed: whether adapters are switched before every call, as some contender has one.
            Otherwise the caller's active adapters stay active.
        unmerged: by contender, why its adapter could not be merged into the weights.
        compiling: by contender, the number of calls that compiled something, and their seconds.
    """

    model: Any
    options: dict[str, Any]
    managed: bool
    unmerged: dict[str, str] = field(default_factory=dict)
    compiling: dict[str, tuple[int, float]] = field(default_factory=dict)

    def activate(self, contender: Contender) -> None:
        """Activate the contender's adapters, or none."""
        if not self.managed:
            return
        if not contender.adapters:
            self.model.disable_adapters()
        else:
            self.model.enable_adapters()
            self.model.set_adapter(list(contender.adapters))
            try:  # updates are merged into the weights, as for serving, where that is possible
                hf_spec.merge_adapter(self.model)
            except ValueError as error:
                self.unmerged.setdefault(contender.name, str(error))

    def close(self) -> None:
        """Unmerge updates from the weights."""
        if self.managed:
            hf_spec.unmerge_adapter(self.model)

    def warm_up(
        self,
        plan: Sequence[tuple[int, list[Contender], list[int]]],
        token_ids: Sequence[list[int]],
    ) -> None:
        """Make a short call of each contender, which also fails early.

        Raises:
            ValueError: a contender does not work.
        """
        first = {size: (lineup, indices[:size]) for size, lineup, indices in reversed(plan)}
        short = min(self.options["max_new_tokens"], WARMUP_TOKENS)
        for lineup, indices in first.values():
            for item in lineup:
                try:
                    self.generate(item, [token_ids[i] for i in indices], max_new_tokens=short)
                except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
                    raise ValueError(f"{item.name}: {first_line(error)}") from error

    def generate(
        self, contender: Contender, prompts: Sequence[list[int]], **overrides: Any
    ) -> tuple[float, list[list[int]], int, SpecStats | None]:
        """One timed call.

        Args:
            contender: the contender.
            prompts: token ids of each prompt.
            overrides: keyword arguments for ``generate``.

        Returns:
            Seconds, new tokens of each sequence, forward passes counted once per unfinished
            sequence, and statistics (None for a stock contender).
        """
        self.activate(contender)
        model = self.model
        inputs = pad_left(prompts, model.generation_config.pad_token_id, model.device)
        kwargs = {**self.options, **contender.kwargs, **overrides}
        random = torch.get_rng_state()
        for _ in range(MOST_COMPILING):
            torch.set_rng_state(random)
            known = counters["stats"]["unique_graphs"]  # of Transformers; hf_spec counts its own
            seconds, sequences, forwards, stats = self._timed(contender, inputs, kwargs)
            made = counters["stats"]["unique_graphs"] - known
            made += 0 if stats is None else stats.details.get("compiled", {}).get("made", 0)
            if not made:
                break
            calls, before = self.compiling.get(contender.name, (0, 0.0))
            self.compiling[contender.name] = calls + 1, before + seconds
        width = inputs["input_ids"].shape[1]
        eos = set(_eos_ids(model.generation_config))
        rows = [_until_eos(row, eos) for row in sequences[:, width:].tolist()]
        if stats is None:
            # The forward passes of a sequence end with its last token, not with the batch.
            most = sequences.shape[1] - width if forwards is None else forwards
            return seconds, rows, sum(min(most, len(row)) for row in rows), None
        return seconds, rows, stats.num_row_steps, stats

    def stream(
        self, contender: Contender, prompts: Sequence[list[int]], batch_size: int
    ) -> tuple[float, list[list[int]], int, SpecStats | None]:
        """Like :meth:`generate`, for any number of prompts, ``batch_size`` at a time."""
        if contender.joining:
            return self._joining(contender, prompts, batch_size)
        starts = range(0, len(prompts), batch_size)
        parts = [self.generate(contender, prompts[i : i + batch_size]) for i in starts]
        seconds, rows, row_steps, stats = parts[0]
        for part in parts[1:]:
            seconds, rows, row_steps = seconds + part[0], rows + part[1], row_steps + part[2]
            if stats is not None and part[3] is not None:
                stats.merge(part[3])
        return seconds, rows, row_steps, stats

    def _joining(
        self, contender: Contender, prompts: Sequence[list[int]], batch_size: int
    ) -> tuple[float, list[list[int]], int, SpecStats]:
        self.activate(contender)
        batch = hf_spec.Batch(self.model, batch_size, **{**self.options, **contender.kwargs})
        synchronize(self.model.device)
        start = time.perf_counter()
        done = list(batch.generate(prompts))
        synchronize(self.model.device)
        seconds = time.perf_counter() - start
        answers = [one.new_tokens.tolist() for one in sorted(done, key=lambda one: one.index)]
        return seconds, answers, batch.stats.num_row_steps, batch.stats

    def _timed(
        self, contender: Contender, inputs: dict[str, torch.Tensor], kwargs: dict[str, Any]
    ) -> tuple[float, torch.Tensor, int | None, SpecStats | None]:
        """Seconds, sequences, and either forward passes (stock contenders) or statistics."""
        model, forwards = self.model, 0
        before = hf_spec.last_stats(model)

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1

        # hf_spec's strategies count their own, as some call the model to draft, too. Compiled code
        # runs no hooks, and makes one forward pass per token.
        counts = contender.stock and not contender.compiled
        hook = model.register_forward_hook(count) if counts else None
        try:
            synchronize(model.device)
            start = time.perf_counter()
            sequences = model.generate(**inputs, **kwargs)
            synchronize(model.device)
            seconds = time.perf_counter() - start
        finally:
            if hook is not None:
                hook.remove()
        if contender.stock:
            return seconds, sequences, forwards if counts else None, None
        stats = hf_spec.last_stats(model)
        if stats is None or stats is before:
            raise RuntimeError("generate() left no statistics: the strategy did not run")
        return seconds, sequences, None, stats

    def compare(
        self,
        outcome: Mapping[str, Measurement],
        token_ids: Sequence[list[int]],
        lineup: Sequence[Contender],
    ) -> None:
        """Set the ``agreement`` of every measurement with its baseline."""
        default = self.model.generation_config.repetition_penalty
        penalty = self.options.get("repetition_penalty", default)
        plains = {item.name: item for item in lineup if item.name == item.baseline}
        for item in sorted(outcome.values(), key=lambda item: item.baseline):
            self.activate(plains[item.baseline])
            plain = outcome[item.baseline]
            item.agreement = [
                classify(self.model, token_ids[index], ours, theirs, penalty)
                for index, ours, theirs in zip(item.prompts, item.rows, plain.rows)
            ]


def pad_left(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Sequences as left-padded ``input_ids`` and ``attention_mask``, both ``(batch, seq)``."""
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + [*row] for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def _until_eos(row: Sequence[int], eos: set[int]) -> list[int]:
    """The sequence up to and including its first EOS; what follows is padding."""
    end = next((index for index, token in enumerate(row) if token in eos), len(row))
    return list(row[: end + 1])
