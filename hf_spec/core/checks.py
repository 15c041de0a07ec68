"""Checks of values that users give, and their messages."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
#: Of a value: raises a ValueError with the given name unless the value is right.
Rule = Callable[[str, Any], None]

#: The command that installs hf_spec: the one place where it stands, for errors, cards and guides.
#: On the package index it will be ``pip install hf_spec``.
INSTALL = "pip install .  # in a clone of hf_spec"
#: What to do, for errors of a strategy that a model has nothing for.
ANOTHER = (
    "Name 'auto', which takes what the model has, or train a drafter for it: `hf-spec train "
    "--help` lists those that can be trained."
)


#: As pays or fits.
AUTO = "auto"


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


def check_count(
    name: str, value: Any, low: int = 1, high: int | None = None, why: str = ""
) -> None:
    """Raise a ValueError unless ``value`` is an int of at least ``low`` (and at most ``high``).

    Args:
        why: for the message, why these are the limits, and what to do.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        kind = type(value)
        other = hasattr(value, "__index__") and kind is not int  # a bool, an int of NumPy
        why = f"Its type is {kind.__name__}: give an int." if other else why
        raise ValueError(f"{name}={value!r}: must be a whole number {limit}.{why and f' {why}'}")


def check_switch(name: str, value: Any) -> None:
    """Raise a ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False.")


def check_choice(name: str, value: Any, choices: Collection[Any], more: str = "") -> None:
    """Raise a ValueError unless ``value`` is one of the choices; ``more`` ends the message."""
    if not any(value == one and type(value) is type(one) for one in choices):
        raise ValueError(
            f"{name}={value!r}{nearest(value, choices)}: choose one of "
            f"{', '.join(map(str, choices))}{more}."
        )


def check_names(whose: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise a ValueError unless all names are known as options of something."""
    for name in given:
        if name not in known:
            raise ValueError(
                f"{whose} has no option {name!r}{nearest(name, known)}; its options are "
                f"{', '.join(sorted(known))}."
            )


@contextmanager
def explained(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds become ValueErrors that say first what could not be done, in a line."""
    try:
        yield
    except kinds as error:
        raise ValueError(f"{what}: {first_line(error)}") from error


#: What code raises where a file that others have written holds something else than it should.
UNFIT = (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def names_its_files(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a function that reads a file or folder, its first argument: errors say which one
    in a line, and are ValueErrors, also those of content that is not as it should be."""

    @functools.wraps(function)
    def reading(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (ValueError, *UNFIT) as error:
            place = str(args[0])
            if isinstance(error, ValueError) and place in str(error):
                raise
            raise ValueError(f"cannot read {place!r}: {first_line(error)}") from error

    return reading


def count(low: int = 1, high: int | None = None) -> Rule:
    """The rule of :func:`check_count`."""
    return partial(check_count, low=low, high=high)


def count_or_auto(high: int, auto: str) -> Rule:
    """The rule of :func:`check_count`, and ``auto`` with what it means."""

    def check(name: str, value: Any) -> None:
        if value != AUTO:
            check_count(name, value, high=high, why=f"Or give {AUTO!r}: {auto}.")

    return check


def number(low: float, high: float, open_low: bool = False) -> Rule:
    """The rule of :func:`check_range`."""
    return partial(check_range, low=low, high=high, open_low=open_low)


#: The rule of shares that are not 0: weights, decays, learning rates.
SHARE = number(0.0, 1.0, open_low=True)


def choice(*choices: Any) -> Rule:
    """The rule of :func:`check_choice`."""
    return partial(check_choice, choices=choices)


def setting(
    default: T, help_text: str = "", rule: Rule | None = None,
    only: Mapping[str, Collection[Any]] | None = None,
) -> T:  # fmt: skip
    """A field of a dataclass, with what :func:`check_fields` looks at.

    Args:
        help_text: for `hf-spec train` and the documentation; those of options are in docstrings.
        rule: of its value; None is right, too, where the field's type says so. Default: where
            ``default`` is True or False, one of these.
        only: values of another field without which it must be left at its default.
    """
    rule = check_switch if rule is None and isinstance(default, bool) else rule
    data = {"help": help_text, "rule": rule, "only": only}
    metadata = {name: value for name, value in data.items() if value}
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(given: Any) -> None:
    """Raise a ValueError unless the fields of a dataclass follow what :func:`setting` says of
    them."""
    for item in dataclasses.fields(given):
        value, metadata = getattr(given, item.name), said_of(type(given), item.name)
        rule, only = metadata.get("rule"), metadata.get("only", {})
        if rule is not None and not (value is None and "None" in str(item.type)):
            rule(item.name, value)
        for name, values in only.items() if only and value != item.default else ():
            if getattr(given, name) not in values:
                raise ValueError(
                    f"{item.name}={value!r} with {name}={getattr(given, name)!r}: it belongs to "
                    f"{name}={' or '.join(map(repr, values))}. Give that, or leave {item.name} out."
                )


def said_of(kind: Any, name: str) -> dict[str, Any]:
    """What :func:`setting` says of a field of a dataclass, and of those that it replaces in base
    classes: a class that only has another default gives just that."""
    found: dict[str, Any] = {}
    for one in kind.__mro__:
        fields = getattr(one, "__dataclass_fields__", {})
        if name in fields:
            found = {**fields[name].metadata, **found}
    return found


def distinct_layers(name: str, layers: Any, high: int | None = None, why: str = "") -> list[int]:
    """``layers`` as a list; ValueError unless they are distinct ints from 0, to ``high`` if it is
    given, and ``why`` these are the limits."""
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise ValueError(f"{name}={layers!r}: must be a list of layers, such as [2, 16, 29].")
    found = list(layers)
    if any(type(one) is not int or one < 0 for one in found) or len({*found}) < len(found):
        raise ValueError(f"{name}={found!r}: must name each layer once, by an int from 0.")
    if found and high is not None:
        check_count(f"layer of {name}", max(found), 0, high, why)
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or all in one line if that announces the rest; its type
    if it has none; of some both, whose message alone, such as a key, says little."""
    kind, text = type(error).__name__, str(error).strip()
    terse = isinstance(error, (LookupError, AttributeError, ArithmeticError, RecursionError))
    lines = (f"{kind}: {text}" if terse else text or kind).splitlines()
    return " ".join(map(str.strip, lines)) if lines[0].rstrip().endswith(":") else lines[0]


def nearest(given: Any, known: Iterable[Any]) -> str:
    """For errors, behind what was given: the known word that is most like it, if one is."""
    words = [*map(str, known if isinstance(given, str) else ())]
    letters = str(given).strip("-")
    found = [word for word in words if len(letters) > 1 and _initials(word) == letters]
    found = found[:1] or get_close_matches(str(given), words, 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _initials(word: str) -> str:
    """``lr`` of ``--learning-rate``."""
    return "".join(part[0] for part in re.split("[-_]+", word) if part)


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


# -- Upper bounds on sizes that options, configs and files request, checked before allocation ------
#
# They are far above useful values: anything beyond them is a mistake or a malicious file.

#: Draft tokens of a tree requested by an option or a file.
MAX_DRAFT_TOKENS = 1024
#: Tokens of earlier answers that are kept for lookups.
MAX_HISTORY = 2**24
#: Nodes of any tree, with room for lookup draft tokens merged into another tree.
MAX_NODES = 2 * MAX_DRAFT_TOKENS
#: Step tokens per batch row: nodes and the probes under them.
MAX_ROWS = 4096
#: Future tokens that an adapter predicts: mask tokens, prompt tokens, or heads.
MAX_FUTURE = 256
#: Probes under a node.
MAX_PROBES = 1024
#: Learned tokens before a sequence.
MAX_PREFIX_KV = 4096
#: Residual blocks of a head.
MAX_BLOCKS = 64
#: Rank and alpha of low-rank updates.
MAX_RANK, MAX_ALPHA = 16384, 1e6
#: Layers, heads and dimensions of a base model; batch sizes, context lengths and threads.
MAX_SHAPE, MAX_SIZE = 65536, 2**31
