"""Recipes: YAML files with the options of ``hf-spec train``."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typer import CallbackParam, Context

from hf_spec.core.checks import nearest

#: Of a command's context: the recipe's file, and what it says beside options that are named there.
FILE, OTHERS = "hf_spec.recipe", "hf_spec.recipe_others"
#: Options of the command that a recipe cannot give.
NOT_GIVEN = {"recipe", "help"}


def read_recipe(path: Path) -> dict[str, Any]:
    """Options by name, with underscores; a ValueError says what is wrong with the file."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the recipe {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}"
        reason = getattr(error, "problem", None) or "not UTF-8"
        raise ValueError(f"the recipe {str(path)!r}{place}: not YAML ({reason})") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(
            f"the recipe {str(path)!r} must hold options by name, such as 'max_steps: 400'"
        )
    return {name.replace("-", "_"): value for name, value in found.items()}


def as_defaults(context: Context, parameter: CallbackParam, path: Path | None) -> Path | None:
    """Make a recipe's options those of the command, unless the command line gives others; called
    before all other options are looked at."""
    if path is None or context.resilient_parsing:
        return path
    given = read_recipe(path)
    own = {one.name for one in context.command.params} - NOT_GIVEN
    named = {name: _text(value) for name, value in given.items() if name in own}
    context.default_map = {**(context.default_map or {}), **named}
    context.meta[FILE] = path
    context.meta[OTHERS] = {name: given[name] for name in given if name not in own}
    return path


def words(context: Context, fields: Iterable[str], arguments: Iterable[str]) -> list[str]:
    """What a recipe says beside named options, as words of a command line.

    Args:
        fields: names of the config's fields, whose values are JSON.
        arguments: names of the other options there are.

    Raises:
        ValueError: there is no such option.
    """
    found = []
    fields, arguments = set(fields), set(arguments)
    own = {one.name for one in context.command.params} - NOT_GIVEN
    for name, value in context.meta.get(OTHERS, {}).items():
        if name not in fields | arguments:
            raise ValueError(
                f"the recipe {str(context.meta[FILE])!r}: there is no option {name!r}"
                f"{nearest(name, sorted(fields | arguments | own))}"
            )
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, list) and name not in fields:
            found += [option, *map(str, value)]
        elif value is not None or name in fields:
            found.append(f"{option}={_text(value, name in fields)}")
    return found


def _text(value: Any, is_json: bool = False) -> Any:
    """A value as the command line has it."""
    if isinstance(value, dict | list) or (is_json and not isinstance(value, str)):
        return json.dumps(value)
    return value
