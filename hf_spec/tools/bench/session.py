"""Timed calls of contenders on one model; knows nothing of files, tables or the terminal."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch._dynamo.utils import counters

import hf_spec
from hf_spec.adapters.active import active_names, fine_tunes
from hf_spec.core.checks import explained
from hf_spec.core.stats import SpecStats, synchronize
from hf_spec.tools.bench.contenders import Contender

T = TypeVar("T")
#: New tokens of a warm-up call: several steps of every strategy.
WARMUP_TOKENS = 16
#: Most repetitions of a call that still compiles something, as the policy tries tree sizes.
MOST_COMPILING = 16
#: Fields of a model's generation config that name a strategy; those of sampling, which greedy runs
#: clear.
STRATEGY_FIELDS = ("assistant_strategy", "assistant_kwargs", "prompt_lookup_num_tokens")
SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip


def _generation_config(model: Any, tokenizer: Any, greedy: bool, ends: bool) -> Any:
    """The model's default generation config without a strategy and, if greedy, without sampling;
    and unless texts end, without EOS."""
    config = copy.deepcopy(model.generation_config)
    for name in (*STRATEGY_FIELDS, *(SAMPLING_FIELDS if greedy else ())):
        if getattr(config, name, None) is not None:
            setattr(config, name, None)
    config.do_sample = config.do_sample and not greedy
    choices = (config.pad_token_id, tokenizer.pad_token_id, *eos_ids(config), 0)
    config.pad_token_id = next(choice for choice in choices if choice is not None)
    if not ends:
        config.eos_token_id = None
    return config


def eos_ids(config: Any) -> list[int]:
    """The tokens that end a text, by a generation config."""
    eos = config.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or ())


class Turn(NamedTuple):
    """A batch of at most ``size`` prompts, which these contenders generate one after the other."""

    size: int
    contenders: list[Contender]
    indices: list[int]


def rotated(items: list[T], number: int) -> list[T]:
    """The order of a turn, which another one begins each time."""
    start = number % max(len(items), 1)
    return items[start:] + items[:start]


@dataclass
class Session:
    """The model, and what all calls share.

    Attributes:
        options: keyword arguments of every call.
        managed: whether adapters are switched before every call, as some contender has one.
            Otherwise the caller's active adapters stay active.
        kept: the adapters that are active in every call, those of :func:`fine_tunes`.
        unmerged: by contender, why its adapter could not be merged into the weights.
        compiling: by contender, the number of calls that compiled something, and their seconds.
    """

    model: Any
    options: dict[str, Any]
    managed: bool
    kept: list[str]
    unmerged: dict[str, str] = field(default_factory=dict)
    compiling: dict[str, tuple[int, float]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(
        cls, model: Any, tokenizer: Any, options: dict[str, Any], contenders: Iterable[Contender],
        ends: bool = True,
    ) -> Iterator[Session]:  # fmt: skip
        """A session for these contenders; the block ends with the model as it was. ``ends``:
        whether texts end with EOS, and not only with ``max_new_tokens``."""
        managed, before = any(item.adapters for item in contenders), active_names(model)
        session = cls(model, options, managed, fine_tunes(model))
        saved = model.generation_config
        greedy = not options["do_sample"]
        model.generation_config = _generation_config(model, tokenizer, greedy, ends)
        try:
            yield session
        finally:
            model.generation_config = saved
            if session.managed:
                hf_spec.unmerge_adapter(model)
                session._set(sorted(before))

    def _set(self, names: list[str]) -> None:
        """Activate these adapters, and no others."""
        if not names:
            self.model.disable_adapters()
        else:
            self.model.enable_adapters()
            self.model.set_adapter(names)

    def activate(self, contender: Contender) -> None:
        """Activate the contender's adapters, or none, beside those that are kept."""
        if not self.managed:
            return
        self._set([*self.kept, *contender.adapters])
        if contender.adapters:
            try:  # updates are merged into the weights, as for serving, where that is possible
                hf_spec.merge_adapter(self.model)
            except ValueError as error:
                self.unmerged.setdefault(contender.name, str(error))

    def notes(self) -> list[str]:
        """What is to be known of the calls."""
        return [
            f"{name} compiled in {count} calls of {seconds:.0f} seconds in all, which are left out"
            for name, (count, seconds) in self.compiling.items()
        ] + [
            f"{name} ran with its update beside the weights: {reason}"
            for name, reason in self.unmerged.items()
        ]

    def warm_up(self, plan: Sequence[Turn], token_ids: Sequence[list[int]]) -> None:
        """Make a short call of each contender at each batch size, which fails early."""
        short = min(self.options["max_new_tokens"], WARMUP_TOKENS)
        for turn in {turn.size: turn for turn in reversed(plan)}.values():
            for item in turn.contenders:
                with explained(item.name, ValueError, TypeError, RuntimeError, NotImplementedError):
                    batch = [token_ids[index] for index in turn.indices]
                    self.generate(item, batch, max_new_tokens=short)

    def generate(
        self, contender: Contender, prompts: Sequence[list[int]], **overrides: Any
    ) -> tuple[float, list[list[int]], int, SpecStats | None]:
        """One timed call with token ids of prompts; ``overrides`` are arguments of ``generate``.

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
        eos = set(eos_ids(model.generation_config))
        rows = [_until_eos(row, eos) for row in sequences[:, width:].tolist()]
        if stats is None:
            # The forward passes of a sequence end with its last token, not with the batch.
            most = sequences.shape[1] - width if forwards is None else forwards
            return seconds, rows, sum(min(most, len(row)) for row in rows), None
        return seconds, rows, stats.num_row_steps, stats

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


def pad_left(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Sequences as left-padded ``input_ids`` and ``attention_mask``, both ``(batch, seq)``."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + [*row] for row in rows], device=device)
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": ids, "attention_mask": torch.tensor(mask, device=device)}


def _until_eos(row: Sequence[int], eos: set[int]) -> list[int]:
    """The sequence up to and including its first EOS; what follows is padding."""
    end = next((index for index, token in enumerate(row) if token in eos), len(row))
    return list(row[: end + 1])
