"""Metrics of a server, in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

import hf_spec
from hf_spec.core.stats import SpecStats

if TYPE_CHECKING:
    from modeling_patches.serving import Generation

#: Label of requests that name no strategy.
PLAIN = "plain"


@dataclass
class _Sums:
    """Sums for one strategy on one model.

    Attributes:
        tokens, steps: generated tokens, and forward passes of the full model and row.
        seconds, plain: seconds between first and last tokens, and those that plain steps would
            have taken, of requests where that is known.
    """

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    plain: float = 0.0


class Metrics:
    """Counts requests; safe to call from any thread."""

    def __init__(self) -> None:
        disable_created_metrics()  # a time beside each counter, which nobody asks for
        self._registry = registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._sums: defaultdict[tuple[str, str], _Sums] = defaultdict(_Sums)
        both, model = ("model", "strategy"), ("model",)

        def counter(name: str, text: str, labels: tuple[str, ...] = both) -> Counter:
            return Counter(f"hf_spec_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = both) -> Gauge:
            return Gauge(f"hf_spec_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            buckets = [0.01 * 2**power for power in range(15)]  # 10 ms to 164 s
            return Histogram(f"hf_spec_{name}", text, both, registry=registry, buckets=buckets)

        self._requests = counter(
            "requests", "Requests that have ended, by outcome: finished, cancelled, failed.",
            (*both, "outcome"),
        )  # fmt: skip
        self._states = {
            "waiting": gauge("requests_waiting", "Requests that wait for their turn.", model),
            "running": gauge("requests_running", "Requests that generate.", model),
        }
        self._prompt = counter("prompt_tokens", "Tokens of the prompts of requests that ran.")
        self._generated = counter("generated_tokens", "Generated tokens.")
        self._steps = counter(
            "forward_passes", "Forward passes of the full model in finished requests."
        )
        self._tau = gauge("tau", "Generated tokens per forward pass of the full model.")
        self._speedup = gauge(
            "speedup", "Seconds that plain steps would have taken, by one of the decoding seconds; "
            "the first tokens left out.",
        )  # fmt: skip
        self._waits = histogram("wait_seconds", "Seconds in line.")
        self._firsts = histogram("first_token_seconds", "Seconds from arrival to the first token.")
        self._whole = histogram("request_seconds", "Seconds from arrival to the last token.")

    def moved(self, request: Generation, before: str | None) -> None:
        """A request has gone on from one state to another."""
        labels = request.model.name_or_path, request.config.assistant_strategy or PLAIN
        if before in self._states:
            self._states[before].labels(labels[0]).dec()
        state, times = request.state, request.times
        if state in self._states:
            self._states[state].labels(labels[0]).inc()
        if state == "running":
            self._prompt.labels(*labels).inc(request.prompt_tokens)
            self._waits.labels(*labels).observe(times["running"] - times["waiting"])
            return
        if state == "waiting":
            return
        self._requests.labels(*labels, state).inc()
        self._generated.labels(*labels).inc(request.tokens)
        if "first" in times:
            self._firsts.labels(*labels).observe(times["first"] - times["waiting"])
        if state == "finished":
            self._whole.labels(*labels).observe(times["finished"] - times["waiting"])
            if labels[1] != PLAIN:
                stats = hf_spec.last_stats(request.model)  # one request runs at a time
                assert stats is not None
                self._speculated(labels, request, stats)

    def _speculated(self, labels: tuple[str, str], request: Generation, stats: SpecStats) -> None:
        self._steps.labels(*labels).inc(stats.num_row_steps)
        with self._lock:
            sums = self._sums[labels]
            sums.tokens += stats.num_generated_tokens
            sums.steps += stats.num_row_steps
            self._tau.labels(*labels).set(sums.tokens / max(sums.steps, 1))
            plain = stats.details["policy"]["plain_seconds"]
            later = request.tokens // (request.config.num_return_sequences or 1) - 1
            if plain and later:
                sums.seconds += request.times["finished"] - request.times["first"]
                sums.plain += plain * later
                self._speedup.labels(*labels).set(sums.plain / sums.seconds)

    def text(self) -> tuple[bytes, str]:
        """Content and media type of an answer."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
