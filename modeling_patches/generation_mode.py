"""Adds a generation mode to Transformers, which a generation option selects.

Transformers looks up the decoding method of a generation mode in a table. ``register`` adds a mode
to that table, a method to ``GenerationMixin`` and attributes to ``GenerationConfig``. With the
attributes at None, ``generate`` is unchanged.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from typing import Any

from transformers import GenerationConfig
from transformers.generation import utils as generation_utils

from modeling_patches.around import around

logger = logging.getLogger(__name__)


@functools.cache
def _warn_of_unused(option: str, switch: str) -> None:
    logger.warning("%s has no effect without %s, which this call does not name.", option, switch)


def register(
    name: str,
    attributes: tuple[str, ...],
    decode: Callable[..., Any],
    validate: Callable[[Any, GenerationConfig, dict[str, Any]], None],
    loaded: Callable[[GenerationConfig, str], None],
    custom: Callable[..., Any],
    default: str,
) -> None:
    """Let ``generate()`` call ``decode`` whenever the first attribute is set. Idempotent.

    Args:
        name: value of the new generation mode, and name of the method.
        attributes: names of new generation options, None by default; the first one selects the
            mode.
        decode: called like ``GenerationMixin._sample``, with the model as first argument.
        validate: ``validate(model, generation_config, mode_kwargs)``, before inputs are prepared,
            raises an error if ``decode`` does not support the call.
        loaded: called with each loaded configuration that has the first attribute set, and its
            folder or repository.
        custom: a callable for ``custom_generate``, or for a ``functools.partial`` that is given
            there: it stands for the mode, which gets all arguments of ``generate``, whereas a
            callable gets neither ``assistant_model``, ``streamer`` nor ``tokenizer``.
        default: value of the first attribute then, where the call names none.
    """
    method = f"_{name}"
    mixin: Any = generation_utils.GenerationMixin
    if getattr(mixin, method, None) is not None:
        return
    switch = attributes[0]
    modes: Any = Enum("SpeculativeMode", {name.upper(): name}, type=str)  # type: ignore[misc]
    mode = modes(name)
    for attribute in attributes:
        setattr(GenerationConfig, attribute, None)

    generation_utils.GENERATION_MODES_MAPPING[mode] = method
    setattr(mixin, method, decode)

    def is_chosen(config: Any) -> bool:
        return getattr(config, switch, None) is not None

    @around(GenerationConfig, "__init__")
    def init(original: Any, self: GenerationConfig, **kwargs: Any) -> None:
        # Transformers drops unknown fields of a saved configuration that was derived from a
        # model's. The attributes would get lost when a model is saved and loaded.
        given = {name: kwargs.pop(name) for name in attributes if name in kwargs}
        original(self, **kwargs)
        for name, value in given.items():
            setattr(self, name, value)

    @around(GenerationConfig, "get_generation_mode")
    def get_generation_mode(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return mode if is_chosen(self) else original(self, *args, **kwargs)

    @around(GenerationConfig, "from_pretrained")
    def from_pretrained(original: Any, cls: Any, place: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(cls, place, *args, **kwargs)
        config = found[0] if isinstance(found, tuple) else found  # with unused keywords
        if is_chosen(config):
            loaded(config, str(place))
        return found

    @around(mixin, "_validate_generation_mode")
    def validate_generation_mode(
        original: Any, self: Any, generation_mode: Any, config: Any, mode_kwargs: Any
    ) -> None:
        if generation_mode is mode:
            validate(self, config, mode_kwargs)
        else:
            unused = [name for name in attributes if getattr(config, name, None)]
            if unused:
                _warn_of_unused(unused[0], switch)
            original(self, generation_mode, config, mode_kwargs)

    def chosen_by(model: Any, args: Any, kwargs: Any) -> Any:
        """The first attribute's value in a call of ``generate``."""
        if switch in kwargs:
            return kwargs[switch]
        configs = [one for one in (*args, *kwargs.values()) if isinstance(one, GenerationConfig)]
        values = (getattr(one, switch, None) for one in (*configs, model.generation_config))
        return next((value for value in values if value is not None), None)

    # The first attribute's value, while ``generate`` loads a method from a repository.
    asked: ContextVar[Any] = ContextVar("asked", default=None)

    def refuse_both(name: str, value: Any, remedy: str) -> None:
        if value is not None:
            raise ValueError(
                f"custom_generate={name} with {switch}={value!r}: both name a decoding method. "
                f"Leave one of the two out ({switch}=None){remedy}."
            )

    @around(mixin, "generate")
    def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        own = kwargs.get("custom_generate")
        if own is None:
            return original(self, *args, **kwargs)
        if getattr(own, "func", own) is custom:
            kwargs = {**getattr(own, "keywords", {}), **kwargs, "custom_generate": None}
            if chosen_by(self, args, kwargs) is None:
                kwargs[switch] = default
            return original(self, *args, **kwargs)
        value = chosen_by(self, args, kwargs)
        if callable(own):
            name, door = getattr(own, "__name__", type(own).__name__), custom.__name__
            door = f"{custom.__module__.partition('.')[0]}.{door}"
            refuse_both(name, value, f", or let {name} call {door}")
        token = asked.set(value)
        try:
            return original(self, *args, **kwargs)
        finally:
            asked.reset(token)

    @around(mixin, "load_custom_generate")
    def load_custom_generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        function = original(self, *args, **kwargs)
        if switch not in inspect.getsource(function):  # those of adapters take it themselves
            refuse_both(repr(str(*args[:1])), asked.get(), "")
        return function

    @around(mixin, "generate_batch")
    def generate_batch(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values(), self.generation_config)
        config = next(value for value in values if isinstance(value, GenerationConfig))
        if is_chosen(config):
            raise ValueError(
                f"{switch}={getattr(config, switch)!r} with continuous batching "
                "(generate_batch, cache_implementation='paged'): the paged cache cannot hold a "
                f"tree. Call generate() without 'paged', or leave {switch} out."
            )
        return original(self, *args, **kwargs)
