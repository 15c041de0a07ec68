"""Checks of user input (ranges, counts, choices) and short texts of errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

#: What pip installs; the one place that changes with a release on the package index.
INSTALL = "hf_spec"


def how_to_install(extra: str | None = None, upgrade: bool = False) -> str:
    """What to run to install hf_spec, or one of its extras."""
    return f"run: pip install {'-U ' * upgrade}{requirement(extra)}"


def requirement(extra: str | None = None) -> str:
    """What stands after ``pip install``, quoted for a shell where that is needed."""
    name, at, url = INSTALL.partition(" @ ")
    text = f"{name}{f'[{extra}]' if extra else ''}{at}{url}"
    return text if text == INSTALL == "hf_spec" else f"'{text}'"


def check_range(
    name: str, value: Any, low: float, high: float = float("inf"), open_low: bool = False
) -> None:
    """Raise a ValueError unless ``value`` is a number in [low, high] (or (low, high])."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name}={value!r}: must be a number in {bracket}{low}, {high}].")


def check_count(name: str, value: Any, low: int = 1, high: int | None = None) -> None:
    """Raise a ValueError unless ``value`` is an int of at least ``low`` (and at most ``high``)."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}={value!r}: must be a whole number {limit}.")


def check_switches(given: Any, *names: str) -> None:
    """Raise a ValueError unless each of these attributes of ``given`` is True or False."""
    for name in names:
        if not isinstance(getattr(given, name), bool):
            raise ValueError(f"{name}={getattr(given, name)!r}: must be True or False.")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_choices(given: Any, **known: Collection[Any]) -> None:
    """Raise a ValueError unless each of these attributes of ``given`` is a known choice."""
    for name, values in known.items():
        if getattr(given, name) not in values:
            raise ValueError(
                f"{name}={getattr(given, name)!r}: choose one of {', '.join(map(str, values))}."
            )


def check_same_settings(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a ValueError that names what differs, if work is continued with other settings.

    Args:
        what: what there is already, such as ``'out' holds a search``.
        before: its settings.
        now: the settings that are compared.
    """
    changes = [
        f"{name} was {before.get(name)!r}, now {value!r}"
        for name, value in now.items()
        if name not in before or before[name] != value
    ]
    if changes:
        raise ValueError(
            f"{what} with other settings ({'; '.join(changes)}): repeat its settings, or give "
            "another --output"
        )
