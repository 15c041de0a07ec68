"""Continuous batching: between two steps, prompts join a batch in place of finished ones."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_spec.core.checks import check_count
from hf_spec.core.stats import SpecStats
from hf_spec.decoding.emission import Emission
from hf_spec.decoding.joining import Finished, Request, Running
from hf_spec.decoding.scoring import Scorer
from modeling_patches.cache_name import CACHE
from modeling_patches.ranks import Ranks
from modeling_patches.support import check_length
from modeling_patches.weights import input_features, placement

#: Arguments of ``generate`` that only make sense for a single call, and why.
_REFUSED = {
    "inputs": "give prompts to add() or generate()",
    "input_ids": "give prompts to add() or generate()",
    "inputs_embeds": "prompts are tokens",
    "attention_mask": "prompts have no padding",
    "position_ids": "positions count from 0",
    CACHE: "a prompt's states are its own",
    "streamer": "results come as prompts finish",
    "custom_generate": "the strategy decodes",
    "synced_gpus": "ranks would have other prompts at the same step",
    "output_scores": "results are tokens",
    "output_logits": "results are tokens",
    "return_dict_in_generate": "results are tokens; statistics are in the batch's stats",
}


class Batch:
    """Prompts that are decoded together; new ones join whenever a place is free.

    Prompts of different lengths thus always run in a full batch, where a call of ``generate`` waits
    for its longest row. Each output equals that of ``generate`` with the prompt alone: exactly for
    greedy decoding, in distribution for sampling. Each prompt has its own random numbers, seeded by
    the default generator when it joins, logits processors and stopping criteria.

    Not thread-safe. ``max_time`` counts from :meth:`add`. If a step fails or is interrupted, the
    next one starts its unfinished prompts again.

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
        self._waiting: deque[Request] = deque()
        self._added = 0
        self._last = False
        self._finished: list[Finished] = []
        self._running: Running | None = None
        #: Requests to start again: those of a step that has failed, or an interrupted one.
        self._again: list[Request] = []

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
        known, _ = input_features(self.model)
        if not 0 <= int(ids.min()) <= int(ids.max()) < known:
            raise ValueError(
                f"a prompt with token ids from {int(ids.min())} to {int(ids.max())}: the model's "
                f"are 0 to {known - 1}."
            )
        self._waiting.append(self._prepared(ids.to(placement(self.model).device), self._added))
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
        return running + len(self._waiting) + len(self._again)

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Fill free places and take one step; return the prompts that it finishes."""
        while self._again:
            one = self._again[-1]
            self._waiting.appendleft(self._prepared(one.prompt, one.index))
            self._again.pop()
        if not self.num_unfinished:
            finished, self._finished = self._finished, []  # of a step that has failed
            return finished
        if self._running is None or (not self._running.num_active and self._running.shrunk):
            self._close()
            self._running = Running(self._waiting[0], self.batch_size, self.stats)
        self._running.fill(self._waiting, self._finished, self._again)
        finished, self._finished = self._finished, []
        if self._running.num_active:
            try:
                finished += self._running.step(self._last and not self._waiting)
            except BaseException:  # its rows may be half changed
                self._again, self._finished = self._running.unfinished, finished
                self._running = None
                raise
        if not self.num_unfinished:
            self._close()
        return finished

    def _close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def _prepared(self, ids: Tensor, index: int) -> Request:
        """The arguments that ``generate`` prepares for a prompt, captured before decoding."""

        def capture(
            model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any,
            generation_config: GenerationConfig, **rest: Any,
        ) -> Request:  # fmt: skip
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
            # Of its own: a processor may keep a state, which is that of one prompt.
            scorer = Scorer(copy.deepcopy(logits_processor), emission)
            return Request(index, model, generation_config, emission, scorer, rest)

        config = copy.deepcopy(self._config)
        found: Request = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config,
            custom_generate=capture, **self._kwargs,
        )  # fmt: skip
        return found


def _token_ids(prompt: Any) -> Tensor:
    """A prompt as int64.

    Raises:
        ValueError: it is none of whole numbers.
    """
    try:
        ids = torch.as_tensor(prompt, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"a prompt of type {type(prompt).__name__}: give the token ids of one prompt, such as "
            "tokenizer(text).input_ids."
        ) from error
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise ValueError(f"a prompt of {ids.dtype}: token ids are whole numbers.")
    return ids.long()
