"""Patches of ``transformers serve``, for every server in this process.

Without them, errors of a request and of ``generate()`` end in a bare 500, or break off a stream
that has begun with status 200.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from huggingface_hub.errors import CacheNotFound
from jinja2 import TemplateError
from transformers import GenerationConfig
from transformers.cli.serving import server, utils
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler

from modeling_patches.serving.front import Front, explanation
from modeling_patches.serving.turns import Generation, TurnManager, current

#: Called as ``prepare(model, continuous)`` when the server starts: with its only model, or None if
#: it loads what requests name, and whether batching is continuous.
Prepare = Callable[[Any, bool], None]
#: Called as ``settle(model, generation_config, given, continuous)`` with the configuration of a
#: request, which it may change, and the options that the request gives; raises a ValueError on
#: what cannot be done.
Settle = Callable[[Any, GenerationConfig, Collection[str], bool], None]


def patch(
    prepare: Prepare,
    settle: Settle,
    moved: Callable[[Generation, str | None], None],
    metrics: Callable[[], tuple[bytes, str]],
    grace: int,
) -> None:
    """Let requests take turns, check them first, and let the server stop in time.

    Args:
        prepare: readies the model of a server that has only one.
        settle: completes and checks a request.
        moved: told of each request's states; see :class:`Generation`.
        metrics: content and media type of the answer at ``/metrics``.
        grace: seconds that requests have to finish after SIGTERM or SIGINT.
    """
    utils.GenerateManager = functools.partial(
        TurnManager, lambda model, config: settle(model, config, current.get().given, False)
    )
    _check_continuous(lambda model, config: settle(model, config, current.get().given, True))
    _prepare(prepare)
    _explain_bodies()
    for handler in (ChatCompletionHandler, CompletionHandler, ResponseHandler):
        _answer_early(handler)
    _list_models()
    build_server = server.build_server

    @functools.wraps(build_server)
    def with_front(*args: Any, **kwargs: Any) -> FastAPI:
        app = build_server(*args, **kwargs)

        @app.get("/metrics")
        def show() -> Response:
            content, media_type = metrics()
            return Response(content, media_type=media_type)

        @app.exception_handler(HTTPException)
        async def refuse(_: Request, error: HTTPException) -> JSONResponse:
            return JSONResponse(explanation(error.detail), error.status_code, error.headers)

        app.add_middleware(Front, moved=moved)
        return app

    server.build_server = with_front
    # The command line builds uvicorn's configuration and has no option for this.
    library: Any = uvicorn
    library.Config = functools.partial(uvicorn.Config, timeout_graceful_shutdown=grace)


def _prepare(prepare: Prepare) -> None:
    init = ModelManager.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        loaded = [timed.model for timed in self.loaded_models.values()]
        prepare(loaded[0] if loaded else None, bool(kwargs.get("continuous_batching")))

    ModelManager.__init__ = __init__


def _check_continuous(check: Callable[[Any, GenerationConfig], None]) -> None:
    manager = utils.CBGenerateManager
    streaming, whole = manager.generate_streaming, manager.generate_non_streaming

    @functools.wraps(streaming)
    def generate_streaming(
        self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any
    ) -> Any:
        check(model, gen_config)
        return streaming(self, model, processor, inputs, gen_config, **kwargs)

    @functools.wraps(whole)
    async def generate_non_streaming(
        self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any
    ) -> Any:
        check(model, gen_config)
        return await whole(self, model, processor, inputs, gen_config, **kwargs)

    manager.generate_streaming = generate_streaming
    manager.generate_non_streaming = generate_non_streaming


def _explain_bodies() -> None:
    """Answer what a body lacks or has wrong with 400; keep its seed and options until its turn."""
    base = utils.BaseHandler
    build, parse = base._build_generation_config, base.get_processor_inputs_from_messages
    resolve = base._resolve_model

    @functools.wraps(build)
    def _build_generation_config(
        self: Any, body: dict[str, Any], config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        if not use_cb and body.get("seed") is not None:
            current.get().seed = _seed(body["seed"])
            body = {**body, "seed": None}
        built = build(self, body, config, use_cb=use_cb)
        if body.get("generation_config") is not None:
            current.get().given = frozenset(json.loads(body["generation_config"]))
        return built

    @functools.wraps(parse)
    def get_processor_inputs_from_messages(messages: Any, *args: Any) -> Any:
        try:
            return parse(messages, *args)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"messages={messages!r}: must be a list of objects with role and content "
                f"({type(error).__name__}: {error})."
            ) from error

    @functools.wraps(resolve)
    def _resolve_model(self: Any, body: dict[str, Any]) -> Any:
        name = body.get("model")
        if not isinstance(name or self.model_manager.force_model, str):
            raise ValueError(f"model={name!r}: name the model to run.")
        try:
            return resolve(self, body)
        except OSError as error:
            raise HTTPException(404, f"model={name!r}: {error}") from error

    base._build_generation_config = _build_generation_config
    base.get_processor_inputs_from_messages = staticmethod(get_processor_inputs_from_messages)
    base._resolve_model = _resolve_model


def _list_models() -> None:
    """List the model of a server with a fixed one, and none if nothing was ever downloaded."""
    cached = ModelManager.get_gen_models

    def get_gen_models(self: Any, *args: Any) -> list[dict[str, Any]]:
        if self.force_model is not None:
            return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": ""}]
        try:
            return cached(*args)
        except CacheNotFound:
            return []

    ModelManager.get_gen_models = get_gen_models


def _seed(value: Any) -> int:
    if not isinstance(value, int) or not -(2**63) <= value < 2**64:  # what torch takes
        raise ValueError(f"seed={value!r}: must be a whole number of at most 64 bits.")
    return value


def _answer_early(handler: Any) -> None:
    """Begin an answer with its first token, so that earlier errors still set the status."""
    handle = handler.handle_request

    @functools.wraps(handle)
    async def handle_request(self: Any, body: dict[str, Any], request_id: str) -> Any:
        with _bad_request():
            if handler is ChatCompletionHandler:
                body.setdefault("messages", None)
            if self.model_manager.force_model is None:
                # Loads the model in a thread, so that other requests continue.
                await asyncio.to_thread(self._resolve_model, dict(body))
            response = await handle(self, body, request_id)
            if isinstance(response, StreamingResponse):
                await current.get().begun()
            return response

    handler.handle_request = handle_request


@contextmanager
def _bad_request() -> Iterator[None]:
    try:
        yield
    except (ValueError, TemplateError) as error:
        raise HTTPException(400, str(error)) from error
    except (TypeError, AttributeError) as error:  # such as a list where a number belongs
        raise HTTPException(400, f"A parameter seems to be of a wrong type: {error}") from error
