"""A generation mode of one's own in `generate()`."""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from difflib import get_close_matches
from enum import Enum
from typing import Any, NamedTuple

from packaging.version import Version
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.utils import GENERATION_MODES_MAPPING

from hf_spec.modeling_patches.per_call import patch_method

# -- The newest versions of the libraries underneath that hf_spec is tested with -------------------
#
# This is the only place that looks at a version: whatever differs between versions is found by what
# is there. A newer one may well work, so it is warned of and not refused.

logger = logging.getLogger(__name__)

#: Major and minor version by package, as in constraints.txt.
NEWEST_TESTED = {"transformers": "5.24", "peft": "0.21"}


@functools.cache
def warn_of_newer() -> None:
    """Warn, once, of each library of a newer minor version."""
    for name, tested in NEWEST_TESTED.items():
        found = importlib.import_module(name).__version__
        if Version(found).release[:2] > Version(tested).release:
            logger.warning(
                "hf_spec is tested up to %s %s; this is %s: should something fail or differ from "
                "plain generate, install '%s==%s.*'.", name, tested, found, name, tested,
            )  # fmt: skip


# -- Adds a generation mode to Transformers, which a generation option selects ---------------------
#
# Transformers looks up the decoding method of a generation mode in a table. ``register`` adds a
# mode to that table, a method to ``GenerationMixin`` and attributes to ``GenerationConfig``. With
# the attributes at None, ``generate`` is unchanged.

#: A mode's option in a call of ``generate`` that loads a method from a repository.
_asked: ContextVar[Any] = ContextVar("asked", default=None)
#: Whether a call of ``generate`` gives None for the option that selects a mode.
_turned_off: ContextVar[bool] = ContextVar("turned_off", default=False)


class Mode(NamedTuple):
    """A generation mode.

    Attributes:
        name: its value, and name of the method.
        attributes: names of new generation options, None by default; the first one selects it.
        decode: called like ``GenerationMixin._sample``, with the model as first argument.
        validate: ``validate(model, generation_config, mode_kwargs)``, before inputs are prepared,
            raises an error if ``decode`` does not support the call.
        loaded: called with each loaded configuration that has an attribute set, unless the
            other ones are given beside its name, and with its folder or repository.
        custom: a callable for ``custom_generate``, or for a ``functools.partial`` that is given
            there: it stands for the mode, which gets all arguments of ``generate``, whereas a
            callable gets neither ``assistant_model``, ``streamer`` nor ``tokenizer``.
        default: value of the first attribute then, where the call names none.
        decode_batch: called like ``GenerationMixin.generate_batch`` where the first attribute is
            set.
        batch_requests: called like ``GenerationMixin.init_continuous_batching``, likewise.
        check_arguments: ``check_arguments(model, value, kwargs)`` before each call with these
            arguments, of which ``value`` is the first attribute's; raises an error for one that
            belongs elsewhere.
    """

    name: str
    attributes: tuple[str, ...]
    decode: Callable[..., Any]
    validate: Callable[[Any, GenerationConfig, dict[str, Any]], None]
    loaded: Callable[[GenerationConfig, str], None]
    custom: Callable[..., Any]
    default: str
    decode_batch: Callable[..., Any]
    batch_requests: Callable[..., Any]
    check_arguments: Callable[[Any, Any, dict[str, Any]], None]

    def option(self, config: Any) -> Any:
        """The option that selects it."""
        return getattr(config, self.attributes[0], None)

    def option_of_call(self, model: Any, args: Any, kwargs: Any) -> Any:
        """The same in a call of ``generate``, or of a method of continuous batching."""
        if self.attributes[0] in kwargs:
            return kwargs[self.attributes[0]]
        configs = [one for one in (*args, *kwargs.values()) if isinstance(one, GenerationConfig)]
        values = map(self.option, (*configs, model.generation_config))
        return next((value for value in values if value is not None), None)

    def refuse_both(self, name: str, value: Any, remedy: str) -> None:
        """Raise a ValueError if the option is set beside a ``custom_generate``."""
        if value is not None:
            switch = self.attributes[0]
            raise ValueError(
                f"custom_generate={name} with {switch}={value!r}: both name a decoding method. "
                f"Leave one of the two out ({switch}=None){remedy}."
            )


def register(mode: Mode) -> None:
    """Let ``generate()`` call ``mode.decode`` whenever the first attribute is set. Idempotent; a
    mode of this name that was registered before, by modules that are loaded again, is replaced."""
    method = f"_{mode.name}"
    if getattr(GenerationMixin, method, None) is mode.decode:
        return
    known = [member for member, own in GENERATION_MODES_MAPPING.items() if own == method]
    if not known:
        members: Any = Enum("Mode", {mode.name.upper(): mode.name}, type=str)  # type: ignore[misc]
        known = [members(mode.name)]
        GENERATION_MODES_MAPPING[known[0]] = method
    setattr(GenerationMixin, method, mode.decode)
    _wrap_configs(mode, known[0])
    _wrap_generate(mode)


def _wrap_configs(mode: Mode, member: Any) -> None:
    """Configurations have the options, and calls with the first one take the mode."""
    for attribute in mode.attributes:
        setattr(GenerationConfig, attribute, None)

    @patch_method(GenerationConfig, "__init__")
    def init(original: Any, self: GenerationConfig, **kwargs: Any) -> None:
        # Transformers drops unknown fields of a saved configuration that was derived from a
        # model's. The attributes would get lost when a model is saved and loaded.
        given = {name: kwargs.pop(name) for name in mode.attributes if name in kwargs}
        original(self, **kwargs)
        for name, value in given.items():
            setattr(self, name, value)

    @patch_method(GenerationConfig, "get_generation_mode")
    def get_generation_mode(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if mode.option(self) is None else member

    @patch_method(GenerationConfig, "from_pretrained")
    def from_pretrained(original: Any, cls: Any, place: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(cls, place, *args, **kwargs)
        config = found[0] if isinstance(found, tuple) else found  # with unused keywords
        given = kwargs.keys() & {*mode.attributes[1:]}
        # A call may name the mode, and take the other ones from here.
        found_any = any(getattr(config, name, None) is not None for name in mode.attributes)
        if found_any and not given:
            mode.loaded(config, str(place))
        return found

    @patch_method(GenerationMixin, "_validate_generation_mode")
    def validate_generation_mode(
        original: Any, self: Any, generation_mode: Any, config: Any, mode_kwargs: Any
    ) -> None:
        if generation_mode is member:
            mode.validate(self, config, mode_kwargs)
            return
        # A strategy of the model's own configuration, or of the call's, may be turned off.
        off = _turned_off.get() or mode.option(self.generation_config) is not None
        for name in () if off else mode.attributes:
            if getattr(config, name, None):
                _warn_of_unused(name, mode.attributes[0])
        original(self, generation_mode, config, mode_kwargs)


def _wrap_generate(mode: Mode) -> None:
    """``mode.custom`` stands for the mode; other methods are refused."""
    switch = mode.attributes[0]

    @patch_method(GenerationMixin, "generate")
    def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        own = kwargs.get("custom_generate")
        if own is not None and getattr(own, "func", own) is mode.custom:
            own, kwargs = None, {**getattr(own, "keywords", {}), **kwargs, "custom_generate": None}
            if mode.option_of_call(self, args, kwargs) is None:
                kwargs[switch] = mode.default
        value = mode.option_of_call(self, args, kwargs)
        mode.check_arguments(self, value, kwargs)
        for own_name in mode.attributes:
            for name in get_close_matches(own_name, kwargs.keys() - {*mode.attributes}, 1, 0.85):
                raise ValueError(f"generate has no argument {name!r} (did you mean {own_name!r}?).")
        if callable(own):
            name = getattr(own, "__name__", type(own).__name__)
            door = f"{mode.custom.__module__.partition('.')[0]}.{mode.custom.__name__}"
            mode.refuse_both(name, value, f", or let {name} call {door}")
        off = switch in kwargs and kwargs[switch] is None
        variable, noted = (_turned_off, off) if own is None else (_asked, value)
        token = variable.set(noted)
        try:
            return original(self, *args, **kwargs)
        finally:
            variable.reset(token)

    @patch_method(GenerationMixin, "load_custom_generate")
    def load_custom_generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        function = original(self, *args, **kwargs)
        if switch not in inspect.getsource(function):  # those of adapters take it themselves
            mode.refuse_both(repr(str(*args[:1])), _asked.get(), "")
        return function

    for name, own in (
        ("generate_batch", mode.decode_batch),
        ("init_continuous_batching", mode.batch_requests),
    ):
        patch_method(GenerationMixin, name)(functools.partial(_of_batches, mode, own))


def _of_batches(
    mode: Mode, own: Callable[..., Any], original: Any, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """A method of continuous batching, or ``own`` if the mode's option is set."""
    if mode.option_of_call(self, args, kwargs) is not None:
        return own(self, *args, **kwargs)
    return original(self, *args, **kwargs)


@functools.cache
def _warn_of_unused(option: str, switch: str) -> None:
    logger.warning("%s has no effect without %s, which this call does not name.", option, switch)
