"""What a server with strategies tells about itself."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hf_spec.core.stats import SpecStats
from hf_spec.decoding.sharing import StepSharing
from hf_spec.threads import locked

#: Seconds that count for the tokens per second.
RECENT = 60.0


class Kind(NamedTuple):
    """Requests that are counted together."""

    model: str
    strategy: str


class Metrics:
    """Counts the requests of a server that name a strategy, once they are answered.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._began = clock, clock()
        self._sharing: dict[str, StepSharing] = {}
        self._requests: Counter[Kind] = Counter()
        self._totals: dict[Kind, SpecStats] = {}
        self._recent: deque[tuple[float, Kind, int]] = deque()  # when, and how many tokens

    @locked
    def follow(self, model: str, sharing: StepSharing) -> None:
        """Tell how many rows a model has."""
        self._sharing[model] = sharing

    @locked
    def add(self, model: str, stats: SpecStats) -> None:
        """Count an answered request."""
        kind = Kind(model, stats.strategy)
        self._requests[kind] += 1
        self._totals.setdefault(kind, SpecStats()).merge(stats)
        self._recent.append((self._clock(), kind, stats.num_generated_tokens))
        self._forget()

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] <= self._clock() - RECENT:
            self._recent.popleft()

    @locked
    def text(self) -> str:
        """All of it, in Prometheus' text format."""
        self._forget()
        recent: Counter[Kind] = Counter()
        for _, kind, tokens in self._recent:
            recent[kind] += tokens
        seconds = min(RECENT, max(self._clock() - self._began, 1.0))
        totals, sharing = self._totals.items(), self._sharing.items()
        tables: list[tuple[str, str, str, Iterable[tuple[dict[str, str], float]]]] = [
            ("rows", "gauge", "Sequences that share steps now.",
             (({"model": name}, one.rows) for name, one in sharing)),
            ("cached_tokens", "gauge", "Tokens that there is room for in their caches.",
             (({"model": name}, one.cached_tokens) for name, one in sharing)),
            ("prefix_tokens", "gauge", "Tokens whose states are kept for prompts.",
             (({"model": name}, one.prefix_tokens) for name, one in sharing)),
            ("requests_total", "counter", "Answered requests.",
             ((kind._asdict(), count) for kind, count in self._requests.items())),
            ("request_seconds_total", "counter", "Time that they ran, in seconds.",
             ((kind._asdict(), one.total_seconds) for kind, one in totals)),
            ("tokens_total", "counter", "Generated tokens.",
             ((kind._asdict(), one.num_generated_tokens) for kind, one in totals)),
            ("row_steps_total", "counter", "Forward passes, counted once per sequence.",
             ((kind._asdict(), one.num_row_steps) for kind, one in totals)),
            ("tau", "gauge", "Generated tokens per forward pass and sequence.",
             ((kind._asdict(), one.tau) for kind, one in totals)),
            ("tokens_per_second", "gauge", "Of requests that were answered in the last minute.",
             ((kind._asdict(), recent[kind] / seconds) for kind in self._totals)),
        ]  # fmt: skip
        lines = []
        for name, shape, said, values in tables:
            lines += [f"# HELP hf_spec_{name} {said}", f"# TYPE hf_spec_{name} {shape}"]
            for labels, value in values:
                quoted = (f"{at}={json.dumps(of, ensure_ascii=False)}" for at, of in labels.items())
                lines.append(f"hf_spec_{name}{{{','.join(quoted)}}} {value:.10g}")
        return "\n".join(lines) + "\n"
