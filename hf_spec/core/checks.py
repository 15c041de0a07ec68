"""Checks of user input (ranges, counts, choices) and short texts of errors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

#: The command that installs hf_spec: the one place where it stands, for errors, cards and guides.
#: On the package index it will be ``pip install hf_spec``.
INSTALL = "pip install .  # in a clone of hf_spec"


def install_extra(extra: str) -> str:
    """What to run for the optional packages of an extra, where hf_spec is installed."""
    return f"run: pip install 'hf_spec[{extra}]'"


def duration(seconds: float) -> str:
    """A duration in words: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


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


def distinct_layers(name: str, layers: Any) -> list[int]:
    """``layers`` as a list; ValueError unless they are distinct ints from 0."""
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise ValueError(f"{name}={layers!r}: must be a list of layers, such as [2, 16, 29].")
    found = list(layers)
    if any(type(one) is not int or one < 0 for one in found) or len({*found}) < len(found):
        raise ValueError(f"{name}={found!r}: must name each layer once, by a whole number from 0.")
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(given: Any, known: Iterable[Any]) -> str:
    """For errors, behind what was given: the known word that is most like it, if one is."""
    words = map(str, known if isinstance(given, str) else ())
    found = get_close_matches(str(given), [*words], 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def check_choices(given: Any, **known: Collection[Any]) -> None:
    """Raise a ValueError unless each of these attributes of ``given`` is a known choice."""
    for name, values in known.items():
        value = getattr(given, name)
        if value not in values:
            raise ValueError(
                f"{name}={value!r}{nearest(value, values)}: choose one of "
                f"{', '.join(map(str, values))}."
            )


def check_same_settings(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a ValueError that names what differs, if what there is already, such as ``'out' holds a
    search``, is continued with other settings."""
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
