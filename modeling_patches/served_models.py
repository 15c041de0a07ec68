"""Readies models as ``transformers serve`` loads them, and looks at its requests.

Everything else of the server is its own.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from transformers.cli.serving import (
    chat_completion,
    completion,
    model_manager,
    response,
    server,
    utils,
)

from hf_spec.modeling_patches.per_call import patch_method
from hf_spec.threads import new_lock

_preparing = new_lock()


@patch_method(utils.BaseHandler, "_build_generation_config")
def build_generation_config(
    original: Any, self: Any, body: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """A request's ``generation_config`` is an object, or a text that holds one as JSON."""
    given = body.get("generation_config")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"generation_config is not JSON: {error}") from error
    if not isinstance(given, dict | None):
        raise ValueError("generation_config must be an object, or JSON of one, such as {}")
    body = {**body, "generation_config": None if given is None else json.dumps(given)}
    try:
        return original(self, body, *args, **kwargs)
    except TypeError as error:
        raise ValueError(f"generation_config: {error}") from error


class Request:
    """What is told of a request that is answered: additions to its usage."""

    def __init__(self) -> None:
        self.usage: dict[str, dict[str, Any]] = {}
        #: Of a stream, whose last part may be made before `generate` has ended.
        self.ends: Future[Any] | None = None

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, in whose thread :func:`tell` is about this request."""

        def run(*args: Any, **kwargs: Any) -> Any:
            _running.request = self
            try:
                return function(*args, **kwargs)
            finally:
                _running.request = None

        return run

    def add_to(self, answer: dict[str, Any]) -> None:
        """Add to the usage of an answer, of whichever of OpenAI's forms."""
        usage: Any = answer.get("usage") or (answer.get("response") or {}).get("usage")
        for name, more in self.usage.items() if isinstance(usage, dict) else ():
            if "output_tokens" in usage:  # a response
                name = IN_RESPONSES.get(name, name)
            usage[name] = {**(usage.get(name) or {}), **more}

    async def told(self, parts: Any) -> AsyncIterator[Any]:
        """The parts of a stream; its usage is in one of them."""
        try:
            async for part in parts:
                if isinstance(part, str) and _USAGE in part:
                    if self.ends is not None:
                        await asyncio.wrap_future(self.ends)
                    part = "\n".join(map(self._line, part.split("\n")))
                yield part
        finally:
            await parts.aclose()  # whose client may have gone away

    def _line(self, line: str) -> str:
        name, separator, text = line.partition(": ")
        if name != "data" or _USAGE not in text:
            return line
        answer = json.loads(text)
        self.add_to(answer)
        return f"{name}{separator}{json.dumps(answer, ensure_ascii=False, separators=(',', ':'))}"


#: Names of the details of a usage in chats and texts, and in responses.
IN_RESPONSES = {
    "prompt_tokens_details": "input_tokens_details",
    "completion_tokens_details": "output_tokens_details",
}
#: What a part of a stream with a usage has, which no text can.
_USAGE = '"usage":{'
#: The request of a task of the server, and that whose ``generate`` runs in a thread.
_asked: ContextVar[Request | None] = ContextVar("asked", default=None)
_running = threading.local()


def tell(**usage: dict[str, Any]) -> None:
    """Add to the usage of the request whose ``generate`` runs in this thread."""
    request: Request | None = getattr(_running, "request", None)
    if request is not None:
        request.usage.update(usage)


async def _answer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A request's answer, with what is told of it."""
    from fastapi.responses import JSONResponse, StreamingResponse

    request = Request()
    token = _asked.set(request)
    try:
        given = await original(self, *args, **kwargs)
    finally:
        _asked.reset(token)
    if isinstance(given, StreamingResponse):
        given.body_iterator = request.told(given.body_iterator)
    elif isinstance(given, JSONResponse) and request.usage:
        answer = json.loads(bytes(given.body))
        request.add_to(answer)
        return JSONResponse(answer, given.status_code)
    return given


for _handler in (
    chat_completion.ChatCompletionHandler,
    completion.CompletionHandler,
    response.ResponseHandler,
):
    patch_method(_handler, "handle_request")(_answer)


def on_load(prepare: Callable[[Any], None]) -> None:
    """Let servers started from now on call ``prepare(model)`` once for each model they load."""
    ready: WeakSet[Any] = WeakSet()

    class ModelManager(model_manager.ModelManager):
        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> Any:
            loaded = super().load_model_and_processor(*args, **kwargs)
            with _preparing:
                if loaded[0] not in ready:
                    prepare(loaded[0])
                    ready.add(loaded[0])
            return loaded

    model_manager.ModelManager = ModelManager


class Threads(utils.InferenceThread):
    """Several threads that take what is submitted, in its order."""

    def __init__(self, count: int):
        super().__init__()
        for _ in range(count - 1):
            threading.Thread(target=self._run, daemon=True).start()


def on_request(
    check: Callable[[Any, Any, Any, Any], None], at_once: Callable[[Any, Any], int]
) -> None:
    """Let servers started from now on call ``check(model, tokenizer, inputs, generation_config)``
    before a request is answered. ValueErrors, also those of ``generate``, are answers with the
    status 400 and the message.

    Args:
        at_once: ``at_once(model, generation_config)`` is how many requests of this kind may run at
            once; 1 for those that take turns.
    """

    class GenerateManager(utils.GenerateManager):
        def __init__(self) -> None:
            super().__init__()
            self._alone: Any = self._thread
            self._several: Threads | None = None

        def _look_at(self, model: Any, processor: Any, inputs: Any, gen_config: Any) -> None:
            """Called by the server's one thread, just before the request is submitted."""
            check(model, getattr(processor, "tokenizer", processor), inputs, gen_config)
            count = at_once(model, gen_config)
            if count > 1 and self._several is None:
                self._several = Threads(count)
            self._thread = self._several if count > 1 else self._alone

        def submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            request = _asked.get()
            if request is None:
                return super().submit(fn, *args, **kwargs)
            request.ends = super().submit(request.within(fn), *args, **kwargs)
            return request.ends

        def async_submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            request = _asked.get()
            within = fn if request is None else request.within(fn)
            return super().async_submit(within, *args, **kwargs)

        def generate_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any
        ) -> Any:
            self._look_at(model, processor, inputs, gen_config)
            return super().generate_streaming(model, processor, inputs, gen_config, **kwargs)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any
        ) -> Any:
            self._look_at(model, processor, inputs, gen_config)
            given = model, processor, inputs, gen_config
            return await super().generate_non_streaming(*given, **kwargs)

    utils.GenerateManager = GenerateManager

    async def refuse(_: Any, error: ValueError) -> Any:
        from fastapi.responses import JSONResponse

        said = {"message": str(error), "type": "invalid_request_error"}
        return JSONResponse({"error": said}, status_code=400)

    _on_build(lambda app: app.exception_handler(ValueError)(refuse))


def on_metrics(text: Callable[[], str]) -> None:
    """Let servers started from now on answer ``GET /metrics`` with a text."""

    def metrics() -> Any:
        from fastapi.responses import PlainTextResponse

        return PlainTextResponse(text(), media_type="text/plain; version=0.0.4")

    _on_build(lambda app: app.get("/metrics")(metrics))


def _on_build(change: Callable[[Any], Any]) -> None:
    """Let servers started from now on be changed."""
    build = server.build_server

    def build_server(*args: Any, **kwargs: Any) -> Any:
        app = build(*args, **kwargs)
        change(app)
        return app

    server.build_server = build_server
