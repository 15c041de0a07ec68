"""Readies models as ``transformers serve`` loads them, and lets it say what is wrong with a
request; everything else of the server is its own."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from fastapi import HTTPException
from transformers.cli.serving import model_manager, server, utils
from transformers.cli.serving.chat_completion import ChatCompletionHandler

_build_server = server.build_server


def on_load(prepare: Callable[[Any], None]) -> None:
    """Let servers started from now on call ``prepare(model)`` once for each model they load, and
    answer bad requests with 400 and the reason, streams, too."""
    ready: WeakSet[Any] = WeakSet()
    preparing = threading.Lock()

    class ModelManager(model_manager.ModelManager):
        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> Any:
            loaded = super().load_model_and_processor(*args, **kwargs)
            with preparing:
                if loaded[0] not in ready:
                    prepare(loaded[0])
                    ready.add(loaded[0])
            return loaded

    model_manager.ModelManager = ModelManager
    utils.GenerateManager = _GenerateManager
    server.build_server = _with_reasons


def num_running() -> int:
    """Number of calls of ``generate`` that run."""
    return len(_running)


# -- requests ------------------------------------------------------------------------------------

_running: set[_Call] = set()
#: The calls that a request has started.
_calls: ContextVar[list[_Call]] = ContextVar("calls")


class _Call:
    """A model as one request calls it.

    Attributes:
        error: what ``generate`` has raised.
        queue: of what is streamed; None if nothing is.
    """

    def __init__(self, model: Any):
        self._model = model
        self.error: Exception | None = None
        self.queue: asyncio.Queue[Any] | None = None
        _calls.get([]).append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        _running.add(self)
        try:
            return self._model.generate(*args, **kwargs)
        except Exception as error:
            self.error = error
            raise
        finally:
            _running.discard(self)

    async def begun(self) -> None:
        """Wait for the first item of a stream; raise the error if it is one."""
        if self.queue is None:
            return
        items = [await self.queue.get()]
        if self.error is not None and isinstance(items[0], utils._StreamError):
            raise self.error
        while not self.queue.empty():
            items.append(self.queue.get_nowait())
        for item in items:  # as they were
            self.queue.put_nowait(item)


class _GenerateManager(utils.GenerateManager):
    def generate_streaming(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        call = _Call(model)
        call.queue, streamer = super().generate_streaming(call, *args, **kwargs)
        return call.queue, streamer

    async def generate_non_streaming(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return await super().generate_non_streaming(_Call(model), *args, **kwargs)


@functools.wraps(_build_server)
def _with_reasons(*args: Any, **kwargs: Any) -> Any:
    for handler in (*args, *kwargs.values()):
        if hasattr(handler, "handle_request"):
            handler.handle_request = functools.partial(_handle, handler, handler.handle_request)
    return _build_server(*args, **kwargs)


async def _handle(handler: Any, handle: Any, body: Any, *args: Any) -> Any:
    """The handler's response; 400 for a request that cannot be read, or that ``generate`` refuses
    before its first token."""
    calls: list[_Call] = []
    _calls.set(calls)
    try:
        if isinstance(handler, ChatCompletionHandler):
            _check_messages(body.get("messages"))
        response = await handle(body, *args)
        for call in calls:
            await call.begun()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if not isinstance(error, ValueError):
            if any(call.error is error for call in calls):
                raise  # a fault of the server's
            error = ValueError(f"the request cannot be read: {error!r}")
        raise HTTPException(400, str(error)) from error
    return response


def _check_messages(messages: Any) -> None:
    known = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages
    )
    if not known or not messages:
        raise ValueError(
            f"messages={messages!r}: must be a list of objects with role and content, such as "
            '[{"role": "user", "content": "Hello"}].'
        )
