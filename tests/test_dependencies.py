"""What we use of other libraries that is not public is listed in CONTRIBUTING.md, and is there.

A newer Transformers or PEFT without one of these names fails here, and the list says what breaks.
"""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import hf_spec
from hf_spec import modeling_patches

ROOT = Path(__file__).parent.parent
LIBRARIES = ("transformers", "peft", "accelerate", "torch", "threading")
#: Modules that need packages which are not always installed, or end the process.
NOT_IMPORTED = (
    "hf_spec.tools.cli.__main__", "hf_spec.modeling_patches.served_models",
    "hf_spec.modeling_patches.tree_attention",
)  # fmt: skip
#: Private by name only.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_replace"}
#: Attributes of ours on objects of others.
MARKS = {"_dense", "_hf_spec", "_static_steps", "_tell_made", "_tiled", "_warms_up"}


class Row(NamedTuple):
    names: list[str]
    purpose: str
    tests: list[str]


def table() -> list[Row]:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:3] == "| `"]
    ticked = re.compile(r"`([^`]+)`")
    return [Row(ticked.findall(names), why, ticked.findall(tests)) for names, why, tests in cells]


def listed() -> set[str]:
    return {name.rpartition(".")[2] for row in table() for name in row.names}


def test_every_row_is_complete() -> None:
    rows = table()
    assert len(rows) > 10
    for row in rows:
        assert row.names and row.purpose and row.tests, row
        for path in row.tests:
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", [name for row in table() for name in row.names])
def test_it_is_there(name: str) -> None:
    """As an attribute; or, if it is one of instances only, in the source of its module."""
    owner, _, last = name.rpartition(".")
    assert owner.partition(".")[0] in LIBRARIES
    found = pkgutil.resolve_name(owner)
    module = inspect.getmodule(found)
    assert module is not None
    assert hasattr(found, last) or re.search(rf"\b{last}\b", inspect.getsource(module))


def is_private(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def names_of(tree: ast.AST) -> Iterator[tuple[Any, bool]]:
    """Private names in a module, and whether it makes them its own."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, True
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, True
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            yield node.attr, isinstance(node.ctx, ast.Store) and owner in ("self", "cls", "own")
        elif isinstance(node, ast.ImportFrom):
            for part in (*(node.module or "").split("."), *(alias.name for alias in node.names)):
                yield part, False
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            yield getattr(node.args[1], "value", None), False


def sources() -> list[str]:
    packages = ("hf_spec", "modeling_patches", "hub_cards")
    return [path.read_text() for name in packages for path in (ROOT / name).rglob("*.py")]


def used() -> set[str]:
    """The private names of others in our code."""
    found = [pair for source in sources() for pair in names_of(ast.parse(source))]
    own = {name for name, ours in found if ours}
    return {name for name, _ in found if is_private(name)} - own - DOCUMENTED - MARKS


def overridden() -> set[str]:
    """Private methods of their classes that classes of ours override."""
    found = set()
    for package in (hf_spec, modeling_patches):
        for part in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if part.name.startswith(NOT_IMPORTED):
                continue
            for ours in vars(importlib.import_module(part.name)).values():
                if inspect.isclass(ours) and ours.__module__ == part.name:
                    theirs = [b for b in ours.__mro__ if b.__module__.startswith(LIBRARIES)]
                    found |= {
                        name for name in vars(ours) if any(name in vars(base) for base in theirs)
                    }
    return {name for name in found if is_private(name)} - {"_abc_impl"}


def test_every_private_name_in_the_code_is_listed() -> None:
    assert used() - listed() == set()
    assert overridden() - listed() == set()


def test_what_is_listed_is_used() -> None:
    words = {word for source in sources() for word in re.findall(r"\w+", source)}
    assert listed() - words == set()
