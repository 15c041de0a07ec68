"""Requests that ``transformers serve`` cannot fulfil are answered with 400 and the reason.

The server itself lets errors of ``generate()`` end in a bare 500, or, where it streams, in the
middle of a response that has begun well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

#: Called as ``check(model, generation_config, continuous)``, the last being whether batching is
#: continuous; raises a ValueError on what cannot be done.
Check = Callable[[Any, GenerationConfig, bool], None]


def answer_refusals(check: Check) -> None:
    """Have every request checked before it generates; in this process, for every server in it.

    ValueErrors of ``check``, of a request's generation configuration and of a ``generate()`` that
    does not stream become 400.
    """
    from transformers.cli.serving import utils

    _wrap(utils.GenerateManager, check, continuous=False)
    _wrap(utils.CBGenerateManager, check, continuous=True)
    build = utils.BaseHandler._build_generation_config

    @functools.wraps(build)
    def _build_generation_config(*args: Any, **kwargs: Any) -> Any:
        with _bad_request():
            return build(*args, **kwargs)

    utils.BaseHandler._build_generation_config = _build_generation_config


def _wrap(manager: Any, check: Check, continuous: bool) -> None:
    streaming, whole = manager.generate_streaming, manager.generate_non_streaming

    @functools.wraps(streaming)
    def generate_streaming(
        self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any
    ) -> Any:
        with _bad_request():
            check(model, gen_config, continuous)
        return streaming(self, model, processor, inputs, gen_config, **kwargs)

    @functools.wraps(whole)
    async def generate_non_streaming(
        self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any
    ) -> Any:
        with _bad_request():
            check(model, gen_config, continuous)
            return await whole(self, model, processor, inputs, gen_config, **kwargs)

    manager.generate_streaming = generate_streaming
    manager.generate_non_streaming = generate_non_streaming


@contextmanager
def _bad_request() -> Iterator[None]:
    from fastapi import HTTPException

    try:
        yield
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
