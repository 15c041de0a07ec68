"""Requests of ``transformers serve`` that take turns on a model.

The server runs one ``generate()`` of a model at a time, in order of arrival. This module follows a
request from arrival to end: its seed is set when its turn comes instead of when it arrives, it
stops when its client disconnects, and errors are reported before the answer begins, streamed or
not.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from typing import Any

import torch
from fastapi import HTTPException
from transformers import GenerationConfig
from transformers.cli.serving import utils

#: States of a request; it ends in one of the last three.
WAITING, RUNNING, FINISHED, CANCELLED, FAILED = (
    "waiting", "running", "finished", "cancelled", "failed",
)  # fmt: skip
ENDED = (FINISHED, CANCELLED, FAILED)

#: Status of a request whose client has disconnected, as in nginx.
CLIENT_GONE = 499

#: Protects torch's default generator, which all threads seed and sample from.
_sampling = threading.Lock()


class Generation:
    """A request, from its arrival to its end.

    Args:
        moved: called as ``moved(generation, previous_state)`` after each change of state, in the
            thread that changed it; first when the request waits for its turn.

    Attributes:
        state: one of the above; None until the request is understood.
        seed: of torch's random numbers, if the request gives one.
        given: names of the generation options that the request gives.
        model: that it runs on.
        config: of the generation.
        prompt_tokens: tokens of its prompt.
        tokens: generated so far, of all rows.
        times: seconds of a monotonic clock at which each state began; ``"first"`` is that of the
            first token.
    """

    def __init__(self, moved: Callable[[Generation, str | None], None]):
        self.state: str | None = None
        self.seed: int | None = None
        self.given: frozenset[str] = frozenset()
        self.model: Any = None
        self.config = GenerationConfig()
        self.prompt_tokens = self.tokens = 0
        self.times: dict[str, float] = {}
        self._moved = moved
        self._lock = threading.Lock()
        self._gone = False
        self._begun: asyncio.Future[None] | None = None

    def wait(self, model: Any, config: GenerationConfig, prompt_tokens: int) -> None:
        """Enter the queue; called in the event loop."""
        self.model, self.config, self.prompt_tokens = model, config, prompt_tokens
        self._begun = asyncio.get_running_loop().create_future()
        self.move(WAITING)

    async def begun(self) -> None:
        """Wait for the first token, or for the end; raises an error that occurs before."""
        if self._begun is not None:
            await self._begun

    def move(self, state: str, error: BaseException | None = None) -> bool:
        """Change the state.

        Returns:
            False if the request has already ended, or its client disconnected before it ran.
        """
        with self._lock:
            if self.state in ENDED or (state == RUNNING and self._gone):
                return False
            before, self.state = self.state, state
            self.times[state] = time.monotonic()
        self._moved(self, before)
        if state in ENDED:
            self._begin(error)
        return True

    def count(self, tokens: int) -> None:
        """Count generated tokens.

        Raises:
            utils._GenerationCancelled: the client has disconnected.
        """
        if self._gone:
            raise utils._GenerationCancelled
        self.tokens += tokens
        if tokens and "first" not in self.times:
            self.times["first"] = time.monotonic()
            self._begin(None)

    def cancel(self) -> None:
        """The client has disconnected: end now if waiting, at the next token if running."""
        with self._lock:
            self._gone, waits = True, self.state == WAITING
        if waits:
            self.move(CANCELLED, HTTPException(CLIENT_GONE))

    def _begin(self, error: BaseException | None) -> None:
        begun = self._begun

        def settle() -> None:
            assert begun is not None
            if begun.done():
                return
            if error is None:
                begun.set_result(None)
            else:
                begun.set_exception(error)
                begun.exception()  # retrieved even if nobody waits for it

        if begun is not None:
            with suppress(RuntimeError):  # the server has stopped meanwhile
                begun.get_loop().call_soon_threadsafe(settle)


#: The request that the running code belongs to.
current: ContextVar[Generation] = ContextVar("generation")


class TurnManager(utils.GenerateManager):
    """Generates like its base class, one request at a time, and updates their states.

    Args:
        settle: called as ``settle(model, generation_config)`` when a request arrives; may change
            the configuration, raises a ValueError on what cannot be done.
    """

    def __init__(self, settle: Callable[[Any, GenerationConfig], None]):
        super().__init__()
        self._settle = settle

    def _turn(self, model: Any, inputs: Any, config: GenerationConfig) -> _Turn:
        self._settle(model, config)
        generation = current.get()
        generation.wait(model, config, inputs["input_ids"].shape[-1])
        return _Turn(model, generation)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The waiting task may be cancelled; the thread's result is delivered nevertheless.
        return asyncio.shield(super().async_submit(fn, *args, **kwargs))

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        turn = self._turn(model, inputs, gen_config)
        return super().generate_streaming(turn, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        turn = self._turn(model, inputs, gen_config)
        try:
            return await super().generate_non_streaming(
                turn, processor, inputs, gen_config, *args, **kwargs
            )
        except utils._GenerationCancelled:
            raise HTTPException(CLIENT_GONE) from None


class _Turn:
    """Wraps the model of a request; its ``generate`` runs when the request's turn comes."""

    def __init__(self, model: Any, generation: Generation):
        self._model, self._generation = model, generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **kwargs: Any) -> Any:
        generation, model = self._generation, self._model
        if not generation.move(RUNNING):
            raise utils._GenerationCancelled
        counter = None
        if (generation.config.num_beams or 1) == 1:  # with beams there is no streamer
            counter = kwargs["streamer"] = _Counter(generation, kwargs.get("streamer"))
        samples = generation.config.do_sample
        if samples is None:
            samples = model.generation_config.do_sample
        try:
            with _sampling if samples else nullcontext():
                if generation.seed is not None:
                    torch.manual_seed(generation.seed)
                sequences = model.generate(**kwargs)
        except utils._GenerationCancelled:
            generation.move(CANCELLED)
            raise
        except BaseException as error:
            generation.move(FAILED, error)
            raise
        if counter is None:
            generation.tokens = sequences[:, generation.prompt_tokens :].numel()
        generation.move(FINISHED)
        return sequences


class _Counter:
    """A streamer that counts tokens and passes them on to another streamer, if there is one."""

    def __init__(self, generation: Generation, streamer: Any):
        self._generation, self._streamer = generation, streamer
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        self._generation.count(0 if self._prompt else value.numel())
        self._prompt = False
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()
