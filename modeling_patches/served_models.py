"""Readies models as ``transformers serve`` loads them, and looks at its requests.

Everything else of the server is its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from transformers.cli.serving import model_manager, server, utils

from hf_spec.modeling_patches.per_call import patch_method
from hf_spec.threads import Lock

_preparing = Lock()


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


def on_request(check: Callable[[Any, Any, Any, Any], None], report: Callable[[Any], None]) -> None:
    """Let servers started from now on call ``check(model, tokenizer, inputs, generation_config)``
    before a request is answered, and ``report(model)`` afterwards. ValueErrors, also those of
    ``generate``, are answers with the status 400 and the message."""

    class GenerateManager(utils.GenerateManager):
        _model: Any = None  # of the request that is being submitted, by the server's one thread

        def _look_at(self, model: Any, processor: Any, inputs: Any, gen_config: Any) -> None:
            check(model, getattr(processor, "tokenizer", processor), inputs, gen_config)
            self._model = model

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

        def submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            return super().submit(self._reported(fn), *args, **kwargs)

        def async_submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            return super().async_submit(self._reported(fn), *args, **kwargs)

        def _reported(self, function: Any) -> Any:
            model = self._model

            def run(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                report(model)
                return result

            return run

    utils.GenerateManager = GenerateManager
    build = server.build_server

    async def refuse(_: Any, error: ValueError) -> Any:
        from fastapi.responses import JSONResponse

        said = {"message": str(error), "type": "invalid_request_error"}
        return JSONResponse({"error": said}, status_code=400)

    def build_server(*args: Any, **kwargs: Any) -> Any:
        app = build(*args, **kwargs)
        app.exception_handler(ValueError)(refuse)
        return app

    server.build_server = build_server
