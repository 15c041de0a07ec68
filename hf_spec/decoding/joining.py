"""Requests that are decoded together; others join in place of those that finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_spec.core.cache import TreeCache
from hf_spec.core.stats import SpecStats, Stopwatch
from hf_spec.core.tree import TokenTree
from hf_spec.decoding.batch import Shrinking
from hf_spec.decoding.choose import Chooser, noise_of
from hf_spec.decoding.emission import Emission
from hf_spec.decoding.handover import Handover
from hf_spec.decoding.outputs import remember_stats
from hf_spec.decoding.prefill import prefill
from hf_spec.decoding.scoring import Scorer
from hf_spec.decoding.steps import Steps, Strategy
from hf_spec.drafting.drafter import DecodingState, Draft
from hf_spec.drafting.noise import SamplingNoise
from hf_spec.model.tree_forward import TreeForward
from modeling_patches.cache_name import cache_in
from modeling_patches.ranks import Ranks
from modeling_patches.weights import placement


@dataclass(frozen=True)
class Finished:
    """A prompt whose output is complete.

    Attributes:
        index: index of the prompt, from 0, in the order of addition.
        sequence: ``(seq,)`` int64, the prompt and its new tokens.
        prompt_length: tokens of the prompt.
    """

    index: int
    sequence: Tensor
    prompt_length: int

    @property
    def new_tokens(self) -> Tensor:
        """``(new,)`` the generated tokens."""
        return self.sequence[self.prompt_length :]


@dataclass
class Request:
    """A prompt with the arguments that ``generate`` prepared for it."""

    index: int
    model: Any
    config: GenerationConfig
    emission: Emission
    scorer: Scorer
    model_kwargs: dict[str, Any]

    @property
    def prompt(self) -> Tensor:
        """``(1, seq)``"""
        return self.emission.ids[:, : self.emission.width]


class Running:
    """Requests that are decoded together.

    Args:
        first: the first request; model, strategy and settings are the same for all.
        batch_size: number of places.
        stats: statistics of all steps.
    """

    def __init__(self, first: Request, batch_size: int, stats: SpecStats):
        model, config = first.model, first.config
        self.model, self.config = model, config
        self.batch_size = batch_size
        self.strategy = Strategy.of(model, config, unsure=True)  # rows differ in length
        self.ranks = Ranks(model)
        if config.do_sample:
            self.ranks.share_random_state()
        self.stats = stats
        self.watch = Stopwatch(stats, model.device, self.ranks.same)
        #: Unfinished request at each place.
        self.requests: list[Request | None] = [None] * batch_size
        self.steps: Steps | None = None
        self.shrinking: Shrinking | None = None
        remember_stats(model, stats)

    @property
    def unfinished(self) -> list[Request]:
        return [one for one in self.requests if one is not None]

    @property
    def num_active(self) -> int:
        return len(self.unfinished)

    @property
    def shrunk(self) -> bool:
        """Whether the batch has shrunk."""
        return self.steps is not None and self.steps.state.batch_size < self.batch_size

    def fill(self, waiting: deque[Request], finished: list[Finished], again: list[Request]) -> None:
        """Admit requests while places are free; one that fails leaves the others as they are.

        Args:
            finished: gets those that finish with their first token, also where a later one fails.
            again: gets one that is interrupted.
        """
        while waiting and self.num_active < self.batch_size and not self.shrunk:
            request = waiting.popleft()
            try:
                with self.watch.phase("forward"):
                    finished += self._join(request)
            except BaseException as error:
                if not isinstance(error, Exception):  # says nothing against the prompt
                    again.append(request)
                raise
        self.watch.step()

    def step(self, last: bool) -> list[Finished]:
        """Take one step of all rows; return the requests that it finishes.

        Args:
            last: no more requests will join, so the batch may shrink.
        """
        steps, shrinking = self.steps, self.shrinking
        assert steps is not None and shrinking is not None
        state = steps.state
        if last and not all(state.active):
            shrinking.step()
        steps.policy.move(self._setting(state.cache, state.batch_size))
        before = list(state.active)
        steps.take()
        over = [n for n, (was, now) in enumerate(zip(before, state.active)) if was and not now]
        if over:  # these slots are no longer read
            lengths = [n if on else 0 for n, on in zip(state.cache.host_lengths, state.active)]
            state.cache.truncate(lengths)
            self.stats.details = steps.details()
        return [self._result(state.rows[place]) for place in over]

    def close(self) -> None:
        """End the batch once no request is running."""
        if self.steps is not None and self.strategy.graphs is not None:
            self.strategy.graphs.spare(self.steps.state.cache.release())
        self.watch.step(last=True)

    def _join(self, request: Request) -> list[Finished]:
        """Run a prompt by itself and give it a place."""
        drafter, emission = self.strategy.drafter, request.emission
        handover = Handover(cache_in(request.model_kwargs), emission, False)
        prompt = prefill(
            self.model, request.prompt, self.config, request.model_kwargs, handover, drafter,
            drafter.wants_hidden,
        )  # fmt: skip
        self._check(prompt.forward)
        noise = self._noise(1)
        chooser = Chooser(
            self.strategy.options, request.scorer, bool(self.config.do_sample), False, noise
        )
        root = Draft(
            TokenTree.chain(0).batch(1, prompt.logits.device), prompt.forward.cache.lengths[:, None]
        )
        choice, _ = chooser.accept(root, prompt.logits[:, None], [True]).on_host()
        emission.take(0, choice.tokens[0])
        self.stats.num_steps += 1
        self.stats.record(1, 0, 0, kept=0)
        if not emission.active[0]:
            return [_finished(request, noise)]
        steps = self.steps or self._start(prompt.forward)
        state = steps.state
        place = state.active.index(False)
        state.cache.replace_row(place, prompt.forward.cache)
        state.forward.replace_row(place, prompt.forward)
        state.replace_row(place, emission.tokens[0], prompt.hidden, prompt.probe_hidden, noise)
        drafter.replace_row(state, place)
        self.requests[state.rows[place]] = request
        state.active[place], state.remaining[place] = True, emission.remaining[0]
        return []

    def _check(self, forward: TreeForward) -> None:
        """Refuse models whose rows are not independent."""
        tensors = [n for n, value in forward.model_kwargs.items() if isinstance(value, Tensor)]
        if forward.reach is not None or tensors:
            reason = (
                f"model inputs {', '.join(tensors)} are those of a whole batch"
                if tensors
                else "its rotary frequencies follow the longest row"
            )
            raise ValueError(
                f"Batch with {type(self.model).__name__}: {reason}. Call generate() instead."
            )

    def _start(self, like: TreeForward) -> Steps:
        """Create a batch of empty places.

        Args:
            like: the forward of the first prompt.
        """
        strategy, drafter = self.strategy, self.strategy.drafter
        cache = TreeCache.like(like.cache, self.batch_size)
        if strategy.graphs is not None:
            cache.use_buckets(strategy.graphs.allocate)
        zeros = torch.zeros_like(cache.lengths)
        forward = TreeForward(
            self.model, cache, zeros, None, like.model_kwargs, drafter.probe_inputs,
            drafter.wants_hidden, strategy.graphs,
        )  # fmt: skip
        rows = Rows(self.requests)
        size = self.batch_size
        state = DecodingState(
            self.model, forward, cache, [[0] for _ in range(size)], zeros, [False] * size,
            [0] * size, bool(self.config.do_sample), rows, self.stats, timed=strategy.timed,
            noise=self._noise(size),
        )  # fmt: skip
        policy = strategy.policy(self.stats, self._setting(cache, size), forward.width)
        state.draft_price = policy.draft_price
        chooser = Chooser(strategy.options, rows, bool(self.config.do_sample), False, state.noise)
        drafter.start(state)
        self.shrinking = Shrinking(state, drafter, rows, _no_ends, strategy.graphs is not None)
        self.steps = Steps(state, strategy, chooser, policy, rows, self.watch, _no_ends)
        return self.steps

    def _setting(self, cache: TreeCache, size: int) -> tuple[int, int, str]:
        return size, cache.max_length.bit_length(), str(self.model.device)

    def _noise(self, rows: int) -> SamplingNoise | None:
        # A single place draws as calls in turn do.
        own = self.batch_size > 1
        return noise_of(self.config, self.strategy.options, rows, placement(self.model).device, own)

    def _result(self, row: int) -> Finished:
        request, self.requests[row] = self.requests[row], None
        assert request is not None and self.steps is not None
        return _finished(request, self.steps.state.noise)


def _finished(request: Request, noise: SamplingNoise | None) -> Finished:
    emission = request.emission
    if noise is not None:
        noise.give_back(emission.emitted[0])
    return Finished(request.index, emission.finish()[0], emission.width)


def _no_ends(rows: Sequence[int]) -> list[int]:
    """No last tokens need caching: no caller gets the cache."""
    return [0] * len(rows)


class Rows:
    """Presents a batch's requests as the sequences and processors of a single call.

    Args:
        requests: the unfinished request at each place; changes as requests join and finish.
    """

    def __init__(self, requests: list[Request | None]):
        self.requests = requests
        self._rows = list(range(len(requests)))

    # -- sequences ---------------------------------------------------------------------------

    @property
    def active(self) -> list[bool]:
        return [one is not None and one.emission.active[0] for one in self.requests]

    @property
    def remaining(self) -> list[int]:
        return [0 if one is None else one.emission.remaining[0] for one in self.requests]

    def take(
        self, row: int, tokens: Sequence[int], scores: Sequence[Tensor], logits: Sequence[Tensor]
    ) -> int:
        request = self.requests[row]
        assert request is not None
        return request.emission.take(0, tokens, scores, logits)

    def end_step(self) -> None:
        """Do nothing: results are returned as prompts finish."""

    def show(self, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        """Do nothing: a batch takes no streamer."""

    # -- processors --------------------------------------------------------------------------

    #: Every request has processors of its own.
    lockstep = False

    @property
    def eos(self) -> set[int]:
        """Tokens that end a request."""
        requests = (one for one in self.requests if one is not None)
        return set().union(*(one.emission.eos for one in requests))

    @property
    def stateful(self) -> list[str]:
        """Names of the processors that may keep a state."""
        return [name for one in self.requests if one is not None for name in one.scorer.stateful]

    @property
    def trivial(self) -> bool:
        """Whether scores are just the logits."""
        return all(one is None or one.scorer.trivial for one in self.requests)

    def select(self, rows: Sequence[int]) -> None:
        """Follow the batch, whose row ``i`` is now the one that was ``rows[i]``."""
        self._rows = [self._rows[row] for row in rows]

    def __call__(
        self, logits: Tensor, suffixes: Sequence[Sequence[int]],
        active: Sequence[bool] | None = None, drafting: bool = False,
    ) -> Tensor:  # fmt: skip
        """Each row's scores, by its own processors; see :class:`Scorer`."""
        scores = logits.float()
        if self.trivial:
            return scores
        made = list(scores.split(1))
        for row, place in enumerate(self._rows):
            request = self.requests[place]
            if request is not None and (active is None or active[row]):
                made[row] = request.scorer(made[row], [suffixes[row]], [True], drafting)
        return torch.cat(made)
