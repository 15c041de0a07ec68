"""Middleware of ``transformers serve`` that detects disconnected clients and ends open answers."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

from modeling_patches.serving.turns import Generation, current

#: Most seconds for telling clients that the server stops.
LAST_WORDS = 1.0
STOPPED = "The server was stopped before the answer was complete."


def explanation(detail: Any, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Body of an error, in the formats of Transformers' and of OpenAI's clients.

    Args:
        detail: the reason.
        kind: the error's type in OpenAI's format.
    """
    return {"detail": detail, "error": {"message": detail, "type": kind}}


class Front:
    """The outermost ASGI middleware.

    Args:
        app: the server.
        moved: see :class:`Generation`.
    """

    def __init__(self, app: Any, moved: Callable[[Generation, str | None], None]):
        self._app, self._moved = app, moved
        self._answers: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, functools.partial(self._last, receive), send)
        elif scope["type"] == "http" and scope["method"] == "POST":
            task = asyncio.current_task()
            assert task is not None
            self._answers.add(task)
            try:
                await self._answer(scope, receive, send)
            finally:
                self._answers.discard(task)
        else:
            await self._app(scope, receive, send)

    async def _last(self, receive: Any) -> Any:
        """The next message of the server's lifespan; a stop first ends open answers."""
        message = await receive()
        if message["type"] == "lifespan.shutdown" and self._answers:
            await asyncio.wait(self._answers, timeout=LAST_WORDS)
        return message

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        generation = Generation(self._moved)
        current.set(generation)
        body = [await receive()]
        while body[-1].get("more_body"):
            body.append(await receive())

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            generation.cancel()

        # Only the disconnection follows the body, and everyone who asks is told about it.
        watcher = asyncio.create_task(left())

        async def take() -> Any:
            if body:
                return body.pop(0)
            await asyncio.wait([watcher])
            return {"type": "http.disconnect"}

        answer = _Answer(send)
        try:
            await self._app(scope, take, answer.send)
        except asyncio.CancelledError:  # the grace period of a stop is over
            await answer.cut_short()
        finally:
            watcher.cancel()
            generation.cancel()


class _Answer:
    """An answer on its way to the client."""

    def __init__(self, send: Any):
        self._send = send
        self._headers: dict[bytes, bytes] | None = None

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._headers = dict(message["headers"])
        await self._send(message)

    async def cut_short(self) -> None:
        """End the answer: with status 503, or with an event if a stream has begun."""
        body, said = b"", json.dumps(explanation(STOPPED, "server_error")).encode()
        if self._headers is None:
            body, headers = said, [(b"content-type", b"application/json")]
            await self._send({"type": "http.response.start", "status": 503, "headers": headers})
        elif self._headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            body = b"data: " + said + b"\n\n"
        await self._send({"type": "http.response.body", "body": body})
