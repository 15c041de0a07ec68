"""Readies models as ``transformers serve`` loads them; everything else of the server is its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from transformers.cli.serving import model_manager

from hf_spec.threads import Lock

_preparing = Lock()


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
