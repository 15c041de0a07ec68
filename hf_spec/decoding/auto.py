"""``assistant_strategy="auto"``: the strategy that fits what a call has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from hf_spec.adapters.loading import load_unattached
from hf_spec.adapters.module import Adapter
from hf_spec.adapters.repo_files import GENERATION
from hf_spec.core.checks import first_line
from hf_spec.core.memory import memory
from hf_spec.decoding.config import AUTO, StoredOptions
from hf_spec.files import read_json
from hf_spec.methods.registry import get_method, methods
from hf_spec.modeling_patches.modules import unwrapped

#: What works with every model, and needs nothing.
LOOKUPS = "prompt_lookup"


@dataclass(frozen=True)
class Choice:
    """What ``assistant_strategy="auto"`` takes.

    Attributes:
        strategy: name of the strategy.
        reason: why this one, in a few words.
        options: those stored beside the adapter that it takes.
        passed: by the strategies that would have come first, why they do not work here.
    """

    strategy: str
    reason: str
    options: StoredOptions = field(default_factory=StoredOptions)
    passed: Mapping[str, str] = field(default_factory=dict)


def choose(model: Any, assistant: Any = None, place: str | None = None) -> Choice:
    """The strategy for a model as it is: with the call's assistant if there is one, else with the
    adapter that the call names, else with the active adapter, else with what the checkpoint brings
    along, else by prompt lookup.

    Raises:
        ValueError: adapters of several strategies are active, or the named one cannot be used.
    """
    if assistant is not None:
        name = next(name for name, method in methods().items() if method.needs_assistant)
        return Choice(name, "the call has an assistant model")
    if place is not None:
        named = load_unattached(unwrapped(model), place)
        name = named.config.strategy
        return Choice(name, "the call names its adapter", _stored(named, name))
    found = {name: method.active_adapter(model) for name, method in methods().items()}
    active = {name: own for name, own in found.items() if own is not None}
    if len(active) > 1:
        raise ValueError(
            f"assistant_strategy={AUTO!r}: adapters of {', '.join(active)} are active. Name one "
            "of these strategies, or activate one adapter with model.set_adapter(...)."
        )
    for name, own in active.items():
        return Choice(name, f"its adapter {own.name!r} is active", _stored(own, name))
    passed: dict[str, str] = {}
    for name, method in methods().items():
        if method.included is not None:
            obstacle = _obstacle(model, name, method.included)
            if obstacle is None:
                return Choice(name, "the model's own checkpoint has layers for it", passed=passed)
            passed[name] = obstacle
    return Choice(LOOKUPS, "it needs no adapter, and none is active", passed=passed)


def resolve_auto(model: Any, config: GenerationConfig, assistant: Any = None) -> None:
    """Put what :func:`choose` says in place of ``auto`` in a call's config; options of the call
    come first."""
    if config.assistant_strategy != AUTO:
        return
    given = config.assistant_kwargs or {}
    place = given.get("adapter") if isinstance(given, dict) else None
    choice = choose(model, assistant, place)
    config.assistant_strategy = choice.strategy
    if isinstance(given, dict) and choice.options:
        given = get_method(choice.strategy).today(given)
        config.assistant_kwargs = StoredOptions(choice.options | given, choice.options.source)


def _obstacle(model: Any, name: str, included: Any) -> str | None:
    """Why a model's checkpoint does not have what a method needs; asked once."""
    known = memory(model)
    if (AUTO, name) not in known:
        try:
            included(model)
            known[AUTO, name] = None
        except (ValueError, NotImplementedError) as error:
            known[AUTO, name] = first_line(error).removeprefix(f"assistant_strategy={name!r}: ")
    obstacle: str | None = known[AUTO, name]
    return obstacle


def _stored(adapter: Adapter, strategy: str) -> StoredOptions:
    """The options stored beside an adapter's weights; empty if there are none."""
    with suppress(OSError, ValueError, AttributeError):
        origin = adapter.origin
        path = None if origin is None else origin.file(GENERATION)
        data = {} if path is None else read_json(path)
        if origin is not None and data.get("assistant_strategy") == strategy:
            options = get_method(strategy).today(data.get("assistant_kwargs") or {})
            return StoredOptions(options, origin.place)
    return StoredOptions()
