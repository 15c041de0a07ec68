"""Readies models as ``transformers serve`` loads them, and looks at its requests.

Everything else of the server is its own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from transformers.cli.serving import model_manager, server, utils

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
