"""Continuous batching: between two steps, prompts join a batch in place of finished ones."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_spec.core.cache import TreeCache
from hf_spec.core.checks import check_count
from hf_spec.core.stats import SpecStats, Stopwatch
from hf_spec.core.tree import TokenTree
from hf_spec.decoding.batch import Shrinking
from hf_spec.decoding.choose import Chooser
from hf_spec.decoding.emission import Emission
from hf_spec.decoding.handover import Handover
from hf_spec.decoding.outputs import remember_stats
from hf_spec.decoding.prefill import prefill
from hf_spec.decoding.scoring import Scorer
from hf_spec.decoding.steps import Steps, Strategy
from hf_spec.drafting.drafter import DecodingState, Draft
from hf_spec.model.tree_forward import TreeForward
from modeling_patches.ranks import Ranks
from modeling_patches.support import check_length

#: Arguments of ``generate`` that only make sense for a single call, and why.
_REFUSED = {
    "inputs": "give prompts to add() or generate()",
    "input_ids": "give prompts to add() or generate()",
    "inputs_embeds": "prompts are tokens",
    "attention_mask": "prompts have no padding",
    "position_ids": "positions count from 0",
    "past_key_values": "a prompt's states are its own",
    "streamer": "results come as prompts finish",
    "custom_generate": "the strategy decodes",
    "synced_gpus": "ranks would have other prompts at the same step",
    "output_scores": "results are tokens",
    "output_logits": "results are tokens",
    "return_dict_in_generate": "results are tokens; statistics are in the batch's stats",
}


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
class _Request:
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


class Batch:
    """Prompts that are decoded together; new ones join whenever a place is free.

    Prompts of different lengths thus always run in a full batch, where a call of ``generate`` waits
    for its longest row. Each output equals that of ``generate`` with the prompt alone: exactly for
    greedy decoding, in distribution for sampling, as all rows draw from one generator. Each prompt
    has its own logits processors and stopping criteria, which see only that prompt.

    Not thread-safe. ``max_time`` counts from :meth:`add`.

    Args:
        model: a causal language model.
        batch_size: number of places.
        generation_config, kwargs: as for ``generate``, the same for all prompts;
            ``assistant_strategy`` must be among them.

    Raises:
        ValueError: if ``batch_size`` is below 1, there is no strategy, or an argument only makes
            sense for a single call; the message names it.

    Example::

        batch = hf_spec.Batch(model, batch_size=8, assistant_strategy="space", max_new_tokens=256)
        for done in batch.generate(prompts):
            print(done.index, tokenizer.decode(done.new_tokens))
    """

    def __init__(
        self, model: Any, batch_size: int = 8, generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ):  # fmt: skip
        check_count("batch_size", batch_size)
        for name, reason in _REFUSED.items():
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(f"Batch({name}=...): {reason}. Leave it out.")
        config = generation_config or model.generation_config
        strategy = kwargs.get("assistant_strategy", getattr(config, "assistant_strategy", None))
        if strategy is None:
            raise ValueError("Batch needs a strategy: give assistant_strategy=...")
        self.model = model
        self.batch_size = batch_size
        self.stats = SpecStats()
        self._config, self._kwargs = generation_config, kwargs
        self._waiting: deque[_Request] = deque()
        self._added = 0
        self._last = False
        self._finished: list[Finished] = []
        self._running: _Running | None = None

    def add(self, prompt: Tensor | Sequence[int]) -> int:
        """Queue a prompt.

        Args:
            prompt: ``(seq,)`` or ``(1, seq)`` token ids, without padding.

        Returns:
            Its index.

        Raises:
            ValueError: if the prompt is empty or has several rows, or if ``generate`` refuses it;
                running prompts are not affected.
        """
        ids = _token_ids(prompt)
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.ndim != 2 or len(ids) != 1 or not ids.shape[1]:
            raise ValueError(
                f"a prompt of shape {tuple(ids.shape)}: give the token ids of one prompt, at "
                "least one token. Each prompt is added by itself."
            )
        known = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        if known is not None and not 0 <= int(ids.min()) <= int(ids.max()) < known:
            raise ValueError(
                f"a prompt with token ids from {int(ids.min())} to {int(ids.max())}: the model's "
                f"are 0 to {known - 1}."
            )
        self._waiting.append(self._prepared(ids.to(self.model.device)))
        self._added += 1
        self._last = False
        return self._added - 1

    def generate(self, prompts: Iterable[Tensor | Sequence[int]]) -> Iterator[Finished]:
        """Decode prompts; yields results in the order in which they finish.

        Args:
            prompts: see :meth:`add`; taken one by one as places become free.
        """
        source, nothing = iter(prompts), object()
        while True:
            while not self._last and self.num_free > 0:
                if (prompt := next(source, nothing)) is nothing:
                    self._last = True
                else:
                    self.add(prompt)  # type: ignore[arg-type]
            if not self.num_unfinished:
                return
            yield from self.step()

    @property
    def num_free(self) -> int:
        """Number of prompts that can start at once; negative if prompts are waiting."""
        return self.batch_size - self.num_unfinished

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting prompts."""
        running = 0 if self._running is None else self._running.num_active
        return running + len(self._waiting)

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Fill free places and take one step; return the prompts that it finishes."""
        if not self.num_unfinished:
            finished, self._finished = self._finished, []  # of a step that has failed
            return finished
        if self._running is None or (not self._running.num_active and self._running.shrunk):
            self._close()
            self._running = _Running(self._waiting[0], self.batch_size, self.stats)
        self._running.fill(self._waiting, self._finished)
        finished, self._finished = self._finished, []
        if self._running.num_active:
            finished += self._running.step(self._last and not self._waiting)
        if not self.num_unfinished:
            self._close()
        return finished

    def _close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def _prepared(self, ids: Tensor) -> _Request:
        """The arguments that ``generate`` prepares for this prompt, captured before decoding."""

        def capture(
            model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any,
            generation_config: GenerationConfig, **rest: Any,
        ) -> _Request:  # fmt: skip
            if len(input_ids) != 1:
                raise ValueError(
                    f"num_return_sequences={generation_config.num_return_sequences} in a Batch: "
                    "add the prompt several times."
                )
            for name in ("synced_gpus", "streamer", "assistant_model", "tokenizer"):
                rest.pop(name, None)
            pad = generation_config._pad_token_tensor
            emission = Emission(
                input_ids, None, stopping_criteria, None if pad is None else int(pad),
                same=Ranks(model).same,
            )  # fmt: skip
            check_length(model, emission.max_length)
            scorer = Scorer(logits_processor, emission)
            return _Request(self._added, model, generation_config, emission, scorer, rest)

        config = copy.deepcopy(self._config)
        found: _Request = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config,
            custom_generate=capture, **self._kwargs,
        )  # fmt: skip
        return found


class _Running:
    """Requests that are decoded together.

    Args:
        first: the first request; model, strategy and settings are the same for all.
        batch_size: number of places.
        stats: statistics of all steps.
    """

    def __init__(self, first: _Request, batch_size: int, stats: SpecStats):
        model, config = first.model, first.config
        self.model, self.config = model, config
        self.batch_size = batch_size
        self.strategy = Strategy.of(model, config, unsure=True)  # rows differ in length
        self.ranks = Ranks(model)
        if config.do_sample:
            self.ranks.share_random_state()
        self.stats = stats
        self.watch = Stopwatch(stats, model.device, self.ranks.same)
        #: Request at each place; None if there has been none.
        self.requests: list[_Request | None] = [None] * batch_size
        self.steps: Steps | None = None
        self.shrinking: Shrinking | None = None
        remember_stats(model, stats)

    @property
    def num_active(self) -> int:
        return 0 if self.steps is None else sum(self.steps.state.active)

    @property
    def shrunk(self) -> bool:
        """Whether the batch has shrunk."""
        return self.steps is not None and self.steps.state.batch_size < self.batch_size

    def fill(self, waiting: deque[_Request], finished: list[Finished]) -> None:
        """Admit requests while places are free.

        Args:
            finished: gets those that finish with their first token, also where a later one fails.
        """
        while waiting and self.num_active < self.batch_size and not self.shrunk:
            with self.watch.phase("forward"):
                finished += self._join(waiting.popleft())
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

    def _join(self, request: _Request) -> list[Finished]:
        """Run a prompt by itself and give it a place."""
        drafter, emission = self.strategy.drafter, request.emission
        handover = Handover(request.model_kwargs.get("past_key_values"), emission, False)
        prompt = prefill(
            self.model, request.prompt, self.config, request.model_kwargs, handover, drafter,
            drafter.wants_hidden,
        )  # fmt: skip
        self._check(prompt.forward)
        chooser = Chooser(self.strategy.options, request.scorer, bool(self.config.do_sample), False)
        root = Draft(
            TokenTree.chain(0).batch(1, prompt.logits.device), prompt.forward.cache.lengths[:, None]
        )
        choice, _ = chooser.accept(root, prompt.logits[:, None], [True]).on_host()
        emission.take(0, choice.tokens[0])
        self.stats.num_steps += 1
        self.stats.record(1, 0, 0, kept=0)
        if not emission.active[0]:
            return [_finished(request)]
        steps = self.steps or self._start(prompt.forward)
        state = steps.state
        place = state.active.index(False)
        self.requests[state.rows[place]] = request
        state.cache.replace_row(place, prompt.forward.cache)
        state.forward.replace_row(place, prompt.forward)
        state.replace_row(place, emission.tokens[0], prompt.hidden, prompt.probe_hidden)
        state.active[place], state.remaining[place] = True, emission.remaining[0]
        drafter.replace_row(state, place)
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
        rows = _Rows(self.requests)
        size = self.batch_size
        state = DecodingState(
            self.model, forward, cache, [[0] for _ in range(size)], zeros, [False] * size,
            [0] * size, bool(self.config.do_sample), rows, self.stats, timed=strategy.timed,
        )  # fmt: skip
        policy = strategy.policy(self.stats, self._setting(cache, size), forward.width)
        state.draft_price = policy.draft_price
        chooser = Chooser(strategy.options, rows, bool(self.config.do_sample), False)
        self.steps = Steps(state, strategy, chooser, policy, rows, self.watch, _no_ends)
        drafter.start(state)
        self.shrinking = Shrinking(state, drafter, rows, _no_ends, strategy.graphs is not None)
        return self.steps

    def _setting(self, cache: TreeCache, size: int) -> tuple[int, int, str]:
        return size, cache.max_length.bit_length(), str(self.model.device)

    def _result(self, row: int) -> Finished:
        request = self.requests[row]
        assert request is not None
        return _finished(request)


def _token_ids(prompt: Any) -> Tensor:
    """A prompt as int64.

    Raises:
        ValueError: it is none of whole numbers.
    """
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"a prompt of type {type(prompt).__name__}: give the token ids of one prompt, such as "
            "tokenizer(text).input_ids."
        ) from error
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise ValueError(f"a prompt of {ids.dtype}: token ids are whole numbers.")
    return ids.long()


def _finished(request: _Request) -> Finished:
    emission = request.emission
    return Finished(request.index, emission.finish()[0], emission.width)


def _no_ends(rows: Sequence[int]) -> list[int]:
    """No last tokens need caching: no caller gets the cache."""
    return [0] * len(rows)


class _Rows:
    """Presents a batch's requests as the sequences and processors of a single call.

    Args:
        requests: the request at each place; changes as requests join.
    """

    def __init__(self, requests: list[_Request | None]):
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

    def stream(self) -> None:
        """Do nothing: results are returned as prompts finish."""

    # -- processors --------------------------------------------------------------------------

    @property
    def trivial(self) -> bool:
        """Whether scores are just the logits."""
        return all(one is None or one.scorer.trivial for one in self.requests)

    def select(self, rows: Sequence[int]) -> None:
        """Follow the batch, whose row ``i`` is now the one that was ``rows[i]``."""
        self._rows = [self._rows[row] for row in rows]

    def __call__(
        self,
        logits: Tensor,
        suffixes: Sequence[Sequence[int]],
        active: Sequence[bool] | None = None,
    ) -> Tensor:
        """Each row's scores, by its own processors; see :class:`Scorer`."""
        scores = logits.float()
        if self.trivial:
            return scores
        made = list(scores.split(1))
        for row, place in enumerate(self._rows):
            request = self.requests[place]
            if request is not None and (active is None or active[row]):
                made[row] = request.scorer(made[row], [suffixes[row]], [True])
        return torch.cat(made)
