"""Statistics of a speculative run: steps, accepted tokens, and time per phase."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

#: Phases of a step that are timed.
PHASES = ("draft", "forward", "verify")
#: Bars of one character, and positions with a bar each, when statistics are printed.
BARS, SHOWN = " ▁▂▃▄▅▆▇█", 10


def bar(share: float) -> str:
    """A bar of one character for a share from 0 to 1."""
    return BARS[round(share * (len(BARS) - 1))]


@dataclass(repr=False)
class SpecStats:
    """Statistics of one call, or of several added up with :meth:`merge`.

    ``print`` shows a summary without ``details``.

    Attributes:
        strategy: name of the strategy; empty if several are added up.
        num_steps: forward passes of the full model, the prefill included.
        num_row_steps: the same, counted once per unfinished sequence.
        num_generated_tokens: emitted tokens of all sequences.
        num_drafted_tokens: draft tokens proposed for all sequences.
        num_pruned_tokens: of these, draft tokens that early pruning dropped.
        num_draft_forwards: extra forward passes made while drafting.
        num_plain_steps: plain steps taken because speculation did not pay, or to time one.
        accepted_histogram: ``{k: n}``: n steps of one sequence emitted k tokens.
        offered: per depth (from 1), steps of one sequence whose draft reached it.
        accepted: per depth, steps of one sequence that accepted a draft token there.
        draft_seconds, forward_seconds, verify_seconds, other_seconds: wall-clock time in drafting,
            in the full model, in verification, and in everything else.
        plain_seconds: estimate of the time that plain steps would have taken for the same tokens,
            the prompt's forward included; 0 if no plain step was timed.
        details: reports of the drafter and the policy.
    """

    strategy: str = ""
    num_steps: int = 0
    num_row_steps: int = 0
    num_generated_tokens: int = 0
    num_drafted_tokens: int = 0
    num_pruned_tokens: int = 0
    num_draft_forwards: int = 0
    num_plain_steps: int = 0
    accepted_histogram: Counter[int] = field(default_factory=Counter)
    offered: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    plain_seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def mean_accepted_tokens(self) -> float:
        """tau: emitted tokens per step and sequence; 1.0 for plain decoding."""
        return self.num_generated_tokens / self.num_row_steps if self.num_row_steps else 0.0

    @property
    def tau(self) -> float:
        """:attr:`mean_accepted_tokens`, by its symbol in papers."""
        return self.mean_accepted_tokens

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the drafts reaching depth i (from 1) whose draft token there was accepted."""
        return [self.accepted.get(i, 0) / self.offered[i] for i in sorted(self.offered)]

    @property
    def total_seconds(self) -> float:
        """Total time of the call in seconds."""
        return self.draft_seconds + self.forward_seconds + self.verify_seconds + self.other_seconds

    def __repr__(self) -> str:
        """The main figures in one line."""
        return (
            f"SpecStats(tokens={self.num_generated_tokens}, steps={self.num_steps}, "
            f"tau={self.tau:.2f}, seconds={self.total_seconds:.3g})"
        )

    @property
    def speed_beside_plain(self) -> float | None:
        """Speed relative to plain steps of the same strategy, estimated from
        :attr:`plain_seconds`; None if no plain step was timed. ``hf-spec bench`` measures plain
        ``generate``."""
        return self.plain_seconds / self.total_seconds if self.plain_seconds else None

    def __str__(self) -> str:
        """Up to eight lines; what did not occur is left out."""
        name = f"{self.strategy}: " if self.strategy else ""
        total, tokens = self.total_seconds, self.num_generated_tokens
        lines = [
            f"{name}{tokens} tokens in {self.num_steps} steps, "
            f"tau {self.tau:.2f} (tokens per step and sequence)"
        ]
        if total:
            beside = self.speed_beside_plain
            estimate = f", {beside:.2f}x its plain steps" if beside is not None else ""
            lines.append(f"{tokens / total:.1f} tokens per second{estimate}, {total:.3g} s")
            parts = ((name, getattr(self, f"{name}_seconds")) for name in (*PHASES, "other"))
            lines.append("time: " + ", ".join(f"{one} {part / total:.0%}" for one, part in parts))
        if self.num_drafted_tokens or self.num_plain_steps:
            lines.append(
                f"{self.num_drafted_tokens} draft tokens; {self.num_plain_steps} plain steps"
            )
        code = self.details.get("compiled")
        if code:
            reasons = [*code["refused"], code.get("outside"), code.get("waits")]
            named = next(filter(None, reasons), None)
            why = f"; some ran without: {named}" if named else ""
            how = f"{code['how']} steps{' by default' * code.get('by_default', False)}"
            lines.append(f"{how}: code ran {code['runs']} times, {code['made']} made{why}")
        if self.details.get("not_recorded"):
            lines.append(f"no step was recorded: {self.details['not_recorded']}")
        shared = self.details.get("shared", {})
        if "rows" in shared:
            lines.append(f"steps shared by sequences: {shared['rows']:.1f} rows in a step")
        elif "alone" in shared:
            lines.append(f"no step was shared: {shared['alone']}")
        if "reused" in shared:
            lines.append(f"{shared['reused']} tokens of the prompt were those of earlier calls")
        shares = self.acceptance_per_position[:SHOWN]
        if shares:
            bars = " ".join(f"{bar(share)} {share:.0%}" for share in shares)
            more = len(self.offered) - SHOWN
            lines.append(
                f"accepted at position 1, 2, ...: {bars}"
                f"{f' and {more} more' * (more > 0)} (of the drafts that reach it)"
            )
        return "\n".join(lines)

    def record(
        self, emitted: int, draft_depth: int, drafted: int, num_accepted: int | None = None,
        pruned: int = 0,
    ) -> None:  # fmt: skip
        """Count one step of one sequence.

        Args:
            emitted: tokens that it emitted.
            draft_depth: depth of its draft; 0 if there was none.
            drafted: its number of draft tokens.
            num_accepted: accepted draft tokens, if a stop cut ``emitted`` short; else emitted - 1.
            pruned: draft tokens that early pruning dropped.
        """
        num_accepted = emitted - 1 if num_accepted is None else num_accepted
        self.num_row_steps += 1
        self.num_generated_tokens += emitted
        self.num_drafted_tokens += drafted
        self.num_pruned_tokens += pruned
        self.accepted_histogram[emitted] += 1
        self.offered.update(range(1, draft_depth + 1))
        self.accepted.update(range(1, min(draft_depth, num_accepted) + 1))

    def merge(self, other: SpecStats) -> None:
        """Add another run's counts and times to these; ``details`` are replaced."""
        first = not self.num_steps
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if item.name == "details":
                self.details = {**mine, **theirs}
            elif item.name == "strategy":
                self.strategy = theirs if first or mine == theirs else ""
            elif item.name == "plain_seconds":  # of all runs, or unknown
                self.plain_seconds = mine + theirs if first or mine and theirs else 0.0
            elif isinstance(mine, dict):
                setattr(self, item.name, Counter(mine) + Counter(theirs))
            else:
                setattr(self, item.name, mine + theirs)

    def to_dict(self) -> dict[str, Any]:
        """All statistics as JSON types, including derived ones."""
        data = copy.deepcopy(vars(self))
        data["tau"] = data["mean_accepted_tokens"] = self.tau
        data["acceptance_per_position"] = self.acceptance_per_position
        for name in ("accepted_histogram", "offered", "accepted"):
            data[name] = {str(key): value for key, value in sorted(data[name].items())}
        return data


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished; does nothing on a CPU."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


class Stopwatch:
    """Adds wall-clock time to a :class:`SpecStats`, step by step.

    On CUDA, events measure each phase without a wait: a phase that the device has not finished when
    a step is recorded counts with a later step. On other accelerators, each phase ends with a
    synchronization.

    Args:
        stats: receives the times.
        device: device of the model.
        same: makes numbers equal in all processes that decode together.

    Attributes:
        waited: seconds of the last recorded step in which the host waited for the device.
    """

    def __init__(
        self, stats: SpecStats, device: torch.device,
        same: Callable[[Sequence[float]], list[float]] = list,
    ):  # fmt: skip
        self.stats = stats
        self._same = same
        self._device = device
        self._began = time.perf_counter()
        self.waited = self._waited = 0.0
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._phase: str | None = None
        #: Phases that the device may not have finished: name, start event and end event.
        self._running: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time as ``name`` (draft, forward or verify). In a profiler's trace it
        is ``hf_spec.<name>``."""
        # A label takes a few microseconds also where no profiler runs.
        label = record_function(f"hf_spec.{name}") if _profiler_enabled() else nullcontext()
        self._phase = name
        try:
            with label, self._timed(name):
                yield
        finally:
            self._phase = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block's time as :attr:`waited`, too."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def without(self, wait: Callable[[], None]) -> Callable[[], None]:
        """A function that waits for others, whose time is left out, also of the phase that runs."""

        def waits() -> None:
            start = time.perf_counter()
            wait()
            seconds = time.perf_counter() - start
            self._began += seconds
            if self._phase is not None:
                self._spent[self._phase] -= seconds

        return waits

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(stream)
            try:
                yield
            finally:
                ended.record(stream)
                self._running.append((name, begun, ended))
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            synchronize(self._device)
            self._spent[name] += time.perf_counter() - start

    def step(self, last: bool = False) -> float:
        """Record the time since the previous call of this method and return it in seconds.

        Time outside all phases counts as ``other_seconds``. The call's ``last`` step awaits phases
        that the device has not finished.
        """
        if last:
            synchronize(self._device)
        while self._running and self._running[0][2].query():  # they finish in order
            name, begun, ended = self._running.pop(0)
            self._spent[name] += begun.elapsed_time(ended) / 1000
        now = time.perf_counter()
        self.waited, self._waited = self._waited, 0.0
        seconds, *phases = self._same([now - self._began, *self._spent.values()])
        self._began = now
        for name, spent in zip(PHASES, phases):
            vars(self.stats)[f"{name}_seconds"] += spent
        self.stats.other_seconds += seconds - sum(phases)
        self._spent = dict.fromkeys(PHASES, 0.0)
        return seconds
