"""Prompt lookup inside vLLM, as a proposer that its ``speculative_config`` names:

    vllm serve M --speculative-config '{"model": "hf_spec.hub.vllm.LookupProposer",
        "num_speculative_tokens": 8}'

After every step, vLLM passes the tokens of its rows and takes draft tokens for each row, any number
of them; it verifies them in the next step. The policy is that of ``generate()``: per step, as many
tokens as save time by their probabilities and the step times, possibly none. vLLM is not imported.
docs/guides/engines.md has options and limits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from hf_spec.core.checks import check_choices, check_count
from hf_spec.core.limits import MAX_DRAFT_TOKENS, MAX_SIZE
from hf_spec.core.stats import SpecStats
from hf_spec.drafting.ngram import Confidence, Limits
from hf_spec.hub.lookups import NO_CHAIN, Chain, EarlierTexts, Lookups
from hf_spec.hub.requests import Request, Requests
from hf_spec.policy.learned import Learned, Setting
from hf_spec.policy.step_policy import StepPolicy

#: Tested versions of vLLM; the interface may differ in others.
TRIED = ("0.32.0",)
#: Key of the options in vLLM's ``additional_config``.
SECTION = "hf_spec"
#: From this number of rows on, steps of similar numbers of rows are pooled.
EXACT_ROWS = 16
#: A step counts as at most this many plain ones; longer ones are pauses of the engine.
PAUSE = 8.0


@dataclass(frozen=True)
class LookupOptions:
    """Options of :class:`LookupProposer`.

    Attributes:
        max_ngram, min_ngram: sizes of n-grams that are looked up, longest first.
        max_matches: places whose continuations are weighed against one another.
        shared_tokens: tokens of ended requests in which others look up, too; 0: each request looks
            up in its own text only.
        drafting: ``auto``: as many tokens as save time, none included. ``always``: all that are
            found.
    """

    max_ngram: int = Limits.max_ngram
    min_ngram: int = Limits.min_ngram
    max_matches: int = Limits.max_matches
    shared_tokens: int = 0
    drafting: str = "auto"

    def __post_init__(self) -> None:
        check_count("max_ngram", self.max_ngram, high=MAX_DRAFT_TOKENS)
        check_count("min_ngram", self.min_ngram, high=self.max_ngram)
        check_count("max_matches", self.max_matches, high=MAX_DRAFT_TOKENS)
        check_count("shared_tokens", self.shared_tokens, low=0, high=MAX_SIZE)
        check_choices(self, drafting=("auto", "always"))

    @classmethod
    def read(cls, additional_config: Any) -> LookupOptions:
        """Those in vLLM's ``additional_config``.

        Raises:
            ValueError: one is unknown, or out of its range.
        """
        given = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
        known = [field.name for field in fields(cls)]
        if not isinstance(given or {}, Mapping) or not {*(given or {})} <= {*known}:
            raise ValueError(
                f"additional_config[{SECTION!r}]={given!r}: must be an object with options among "
                f"{', '.join(known)}."
            )
        return cls(**(given or {}))


def batch_key(rows: int) -> int:
    """The number of rows, rounded to four binary digits from :data:`EXACT_ROWS` on."""
    unit = 1 << max(rows.bit_length() - EXACT_ROWS.bit_length() + 1, 0)
    return rows // unit * unit


class Policies:
    """The policies of steps, by number of rows.

    Step times are kept per number of rows; gains of speculation per power of two, so that large
    batches that it slows down do not affect small ones.

    Args:
        stats: counts seconds of drafting.
        enabled: if False, every step drafts everything that is found.
    """

    def __init__(self, stats: SpecStats, enabled: bool):
        self.stats, self.enabled = stats, enabled
        self._settings: dict[tuple[int, int, str], Setting] = {}
        self._policies: dict[int, StepPolicy] = {}

    def of(self, rows: int) -> StepPolicy:
        """The policy of a step with this number of rows."""
        key, power = (batch_key(rows), 0, "vllm"), rows.bit_length()
        if power not in self._policies:
            learned = Learned(settings=self._settings, packed=True)
            self._policies[power] = StepPolicy(self.stats, learned, key, self.enabled)
        policy = self._policies[power]
        policy.move(key)
        return policy

    def begin(self) -> None:
        """Called when a request begins, whose text may differ."""
        for policy in self._policies.values():
            policy.begin()


class Step(NamedTuple):
    """The step that is running.

    Attributes:
        policy: the policy that chose its draft tokens.
        began: time when drafting began, in seconds.
        rows: number of rows that it may draft for.
    """

    policy: StepPolicy
    began: float
    rows: int


class LookupProposer:
    """Drafts tokens that vLLM verifies: those that followed earlier occurrences of the last tokens.

    Args:
        vllm_config: vLLM's config; options are in its ``additional_config["hf_spec"]``.

    Raises:
        ValueError: if an option is unknown or out of its range.
        RuntimeError: if this vLLM has another interface.
    """

    def __init__(self, vllm_config: Any, clock: Callable[[], float] = time.perf_counter):
        try:
            self._depth = int(vllm_config.speculative_config.num_speculative_tokens)
            self._longest = int(vllm_config.model_config.max_model_len)
            given = vllm_config.additional_config
        except (AttributeError, TypeError) as error:
            raise RuntimeError(
                f"this vLLM has another interface for proposers of users ({error}): hf_spec was "
                f"tried with {', '.join(TRIED)}; install one of these."
            ) from error
        self.options = options = LookupOptions.read(given)
        self._limits = Limits(options.max_ngram, options.min_ngram, options.max_matches)
        self._clock = clock
        self._priors = Confidence(), Confidence()
        self._earlier = EarlierTexts(self._limits, options.shared_tokens)
        self._requests = Requests(self._new_lookups)
        self.stats = SpecStats()
        self._policies = Policies(self.stats, options.drafting == "auto")
        self._step: Step | None = None

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model to load."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any,
        token_ids_cpu: Any, slot_mappings: Any = None, **_: Any,
    ) -> list[list[int]]:  # fmt: skip
        """Draft tokens for each row.

        Args:
            sampled_token_ids: per row, tokens sampled in the last step; empty in the middle of a
                prompt.
            num_tokens_no_spec: ``(rows,)`` int32 number of tokens in each row, including these.
            token_ids_cpu: ``(rows, max_model_len)`` int32 the tokens themselves.
            slot_mappings: not used.

        Returns:
            Draft tokens per row, at most ``num_speculative_tokens`` each.
        """
        began = self._clock()
        rows, absent = self._requests.follow(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        self._observe(rows, began, len(sampled_token_ids))
        for request in absent:
            self._earlier.add(request.tokens)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        self._step = None
        if rows:
            policy = self._policies.of(len(rows))
            if policy.drafts():
                for row, tokens in self._draft(policy, rows).items():
                    drafts[row] = tokens
            for row, request in rows.items():
                request.num_drafted = len(drafts[row])
            self._step = Step(policy, began, len(rows))
            self.stats.draft_seconds += self._clock() - began
        return drafts

    def _new_lookups(self) -> Lookups:
        self._policies.begin()
        return Lookups(self._limits, self._priors, self._earlier)

    def _observe(self, rows: Mapping[int, Request], now: float, batch: int) -> None:
        """Learn from the last step: its tokens and its time.

        The times of steps with prompts, or with other requests than before, are not representative.
        """
        emitted = [request.emitted for request in rows.values() if request.emitted is not None]
        for request in rows.values():
            if request.emitted is not None:
                request.lookups.observe(request.emitted)
        step = self._step
        if step is None or not len(emitted) == batch == step.rows:
            return
        seconds, plain = now - step.began, step.policy.setting.times.plain_seconds()
        for request, tokens in zip(rows.values(), emitted):
            self.stats.record(len(tokens), request.num_drafted, request.num_drafted)
        drafted = sum(request.num_drafted for request in rows.values())
        seconds = seconds if plain is None else min(seconds, PAUSE * plain)
        step.policy.note(drafted, 1 + drafted, sum(map(len, emitted)), batch, seconds)

    def _draft(self, policy: StepPolicy, rows: Mapping[int, Request]) -> dict[int, list[int]]:
        """The likeliest draft tokens of all rows, as many as the policy takes."""
        chains = {row: self._find(request) for row, request in rows.items()}
        if self.options.drafting == "always":
            return {row: list(chain.tokens) for row, chain in chains.items()}
        # Probabilities fall along a chain, so the likeliest tokens form prefixes of the chains.
        order = sorted((-p, row) for row, chain in chains.items() for p in chain.probabilities)
        count = policy.count([-p for p, _ in order], len(rows))
        lengths = Counter(row for _, row in order[:count])
        return {row: list(chains[row].tokens[:length]) for row, length in lengths.items()}

    def _find(self, request: Request) -> Chain:
        """Draft tokens of a request; leaves room for the step's own token in the context length."""
        room = self._longest - len(request.tokens) - 1
        depth = min(self._depth, room)
        return request.lookups.find(request.tokens, depth) if depth > 0 else NO_CHAIN
