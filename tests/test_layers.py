"""Imports flow one way, as CONTRIBUTING says; every import statement is looked at.

``modeling_patches``, ``core`` -> ``model`` -> ``adapters`` -> ``drafting`` -> ``policy`` ->
``methods.registry`` -> ``methods.<name>`` -> ``decoding`` -> the package itself, which ends the
library -> ``tools``: ``data``, ``progress``, ``training``, ``search``, ``bench``, ``formats``,
``hub``, ``demo`` -> ``tools.cli``.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

TOOLS = ["data", "loading", "progress", "training", "search", "bench", "formats", "hub", "demo"]
#: Layers from the bottom up. Packages of one layer may import each other, but not in a circle.
LAYERS: list[set[str]] = [
    {"modeling_patches", "hf_spec.core", "hf_spec.files"},
    {"hf_spec.cache"},
    {"hf_spec.model"},  # all that touches a model of Transformers
    {"hf_spec.adapters"},
    {"hf_spec.drafting"},
    {"hf_spec.policy"},
    {"hf_spec.methods"},  # the registry
    {"hf_spec.methods.*"},
    {"hf_spec.decoding"},
    {
        "hf_spec",
        "hf_spec.integrations",
    },  # the public names; below is the library, which never imports a tool
    {f"hf_spec.tools.{name}" for name in TOOLS},
    {"hf_spec.tools.cli"},
]
OURS = ("hf_spec", "modeling_patches")

#: Modules of the standard library that read, write, talk or start something.
IO_MODULES = {
    "asyncio", "fileinput", "ftplib", "glob", "http", "io", "logging", "mmap", "multiprocessing",
    "os", "pathlib", "pickle", "shelve", "shutil", "signal", "socket", "sqlite3", "ssl",
    "subprocess", "sys", "tempfile", "urllib", "zipfile",
}  # fmt: skip
IO_NAMES = {"open", "print", "input", "exec", "eval"}

#: (module, what it imports); what is imported may be a module or a name in one.
Import = tuple[str, str]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Everything imported anywhere in the source, lazily or for types only included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def all_imports() -> list[Import]:
    found = []
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = module_name(path)
            names = imports_of(path.read_text("utf-8"), module, path.name == "__init__.py")
            found += [(module, name) for name in names]
    return found


def unit(name: str, modules: set[str]) -> str | None:
    """The unit of the layering that a module, or a name in one, belongs to; None if not ours."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    parts = name.split(".")
    if parts[0] == "modeling_patches":
        return "modeling_patches"
    if parts[0] != "hf_spec":
        return None
    if parts[1:2] == ["tools"]:
        return ".".join(parts[:3])
    if parts[1:2] != ["methods"]:
        return ".".join(parts[:2])
    return ".".join(parts[:3]) if parts[2:] not in ([], ["registry"]) else "hf_spec.methods"


def rank(name: str) -> int:
    generic = "hf_spec.methods.*" if name.startswith("hf_spec.methods.") else name
    for height, layer in enumerate(LAYERS):
        if generic in layer:
            return height
    raise AssertionError(f"{name} has no place in LAYERS: add it where it belongs.")


def violations(imports: list[Import], modules: set[str]) -> list[str]:
    """Every import that goes up, across methods, or in a circle within a layer."""
    found = []
    sideways: dict[str, set[str]] = {}
    for module, imported in imports:
        here, there = unit(module, modules), unit(imported, modules)
        if here is None or there is None or here == there:
            continue
        if rank(there) > rank(here):
            found.append(f"{module} imports {imported} from a layer above")
        elif rank(there) < rank(here):
            continue
        elif here.startswith("hf_spec.methods."):
            found.append(f"{module} imports {imported} of another method")
        elif rank(here) == 0:
            found.append(f"{module} imports {imported}: modeling_patches and core stand alone")
        else:
            sideways.setdefault(here, set()).add(there)
    for start in sideways:
        reached, todo = set(), [start]
        while todo:
            for after in sideways.get(todo.pop(), set()) - reached:
                reached.add(after)
                todo.append(after)
        if start in reached:
            found.append(f"{start} imports itself in a circle through its layer")
    return found


def impurities(source: str, module: str) -> list[str]:
    """What a module of core must not do: models, adapters, I/O."""
    found = []
    for name in imports_of(source, module):
        top = name.split(".")[0]
        allowed = top in ("numpy", "torch") or name.startswith("hf_spec.core")
        if not allowed and (top in IO_MODULES or top not in sys.stdlib_module_names):
            found.append(f"{module} imports {name}")
    for node in ast.walk(ast.parse(source)):
        written = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        if written in IO_NAMES or written in ("torch.load", "torch.save", "torch.hub", "torch.nn"):
            found.append(f"{module} uses {written}")
    return found


@cache
def our_modules() -> set[str]:
    return {module_name(p) for package in OURS for p in (ROOT / package).rglob("*.py")}


def test_imports_flow_one_way() -> None:
    imports = all_imports()
    assert len(imports) > 100  # the files were found
    assert violations(imports, our_modules()) == []
    patches = [name for module, name in imports if module.startswith("modeling_patches")]
    assert patches and not [name for name in patches if name.startswith(("hf_spec", "hub_cards"))]


def test_the_library_has_few_rooms() -> None:
    rooms = {name.split(".")[1] for name in our_modules() if name.count(".") > 1} - {"tools"}
    assert {"core", "decoding", "methods"} <= rooms and len(rooms) <= 9, sorted(rooms)


def test_core_knows_neither_models_nor_files() -> None:
    files = sorted((ROOT / "hf_spec" / "core").rglob("*.py"))
    assert len(files) >= 5
    found = [impurities(path.read_text("utf-8"), module_name(path)) for path in files]
    assert [line for lines in found for line in lines] == []


def test_nothing_imports_an_engine() -> None:
    """None is a dependency."""
    for module, imported in all_imports():
        assert imported.split(".")[0] not in ("vllm", "sglang"), f"{module} imports {imported}"


def test_no_module_names_a_method_but_its_own() -> None:
    """Nothing outside a method imports from it: all go through discovery."""
    modules = our_modules()
    for module, imported in all_imports():
        target = unit(imported, modules) or ""
        if target.startswith("hf_spec.methods."):
            # Below decoding that is the rule of the layers; the config classes are public names.
            here = unit(module, modules)
            assert here in (target, "hf_spec"), f"{module} imports {imported}"
