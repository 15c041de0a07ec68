"""Imports flow one way, as CONTRIBUTING says; every import statement is looked at."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

TOOLS = ["data", "loading", "training", "search", "bench", "formats", "hub", "transfer", "demo"]
#: Layers from the bottom up. Packages of one layer may import each other, but not in a circle.
LAYERS: list[set[str]] = [
    {"hf_spec.threads"},  # locks
    {"hf_spec.modeling_patches", "hf_spec.core", "hf_spec.files"},
    {"hf_spec.cache"},
    {"hf_spec.target"},  # all that touches a model of Transformers
    {"hf_spec.adapters"},
    {"hf_spec.draft"},
    {"hf_spec.predict"},
    {"hf_spec.methods"},  # the registry
    {"hf_spec.methods.*"},
    {"hf_spec.decoding"},
    {"hf_spec", "hf_spec.integrations"},  # the library's top, which never imports a tool
    {f"hf_spec.tools.{name}" for name in TOOLS},
    {"hf_spec.tools.cli"},
]
OURS = ("hf_spec", "modeling_patches")
#: Names of tools among the library's, which are imported when they are first asked for
#: (tests/test_import.py).
LAZY = {("hf_spec", "hf_spec.tools.bench.runner.benchmark")}

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
    parts = parts if parts[0] == "hf_spec" else ("hf_spec", *parts)  # as installed
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str) -> Iterator[str]:
    """Everything imported anywhere in the source, lazily or for types only included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{ast.unparse(node)}: name the module in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def our_modules() -> dict[str, str]:
    """The source of each module by its name."""
    paths = [path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))]
    return {module_name(path): path.read_text("utf-8") for path in paths}


@cache
def all_imports() -> list[Import]:
    sources = our_modules().items()
    return [(module, name) for module, source in sources for name in imports_of(source)]


def unit(name: str) -> str | None:
    """The unit of the layering that a module, or a name in one, belongs to; None if not ours."""
    while name and name not in our_modules():
        name = name.rpartition(".")[0]
    parts = name.split(".")
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


def violations(imports: list[Import]) -> list[str]:
    """Every import that goes up, into a method, or in a circle within a layer."""
    found = []
    sideways: dict[str, set[str]] = {}
    for module, imported in imports:
        here, there = unit(module), unit(imported)
        if here is None or there is None or here == there:
            continue
        if (module, imported) in LAZY:
            continue
        if rank(there) > rank(here):
            found.append(f"{module} imports {imported} from a layer above")
        elif there.startswith("hf_spec.methods.") and here != "hf_spec":
            # Config classes are public names; all else goes through discovery.
            found.append(f"{module} imports {imported} of a method")
        elif rank(there) < rank(here):
            continue
        elif rank(here) == 1:
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


def impurities(module: str, source: str) -> list[str]:
    """What a module of core must not do: models, adapters, I/O."""
    found = []
    for name in imports_of(source):
        top = name.split(".")[0]
        allowed = top in ("numpy", "torch") or name.startswith(("hf_spec.core", "hf_spec.threads"))
        if not allowed and (top in IO_MODULES or top not in sys.stdlib_module_names):
            found.append(f"{module} imports {name}")
    for node in ast.walk(ast.parse(source)):
        written = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        if written in IO_NAMES or written in ("torch.load", "torch.save", "torch.hub", "torch.nn"):
            found.append(f"{module} uses {written}")
    return found


def test_imports_flow_one_way() -> None:
    imports = all_imports()
    assert len(imports) > 100  # the files were found
    assert violations(imports) == []
    engines = {"vllm", "sglang"}  # which are no dependencies
    assert [name for _, name in imports if name.split(".")[0] in engines] == []
    patches = [name for module, name in imports if unit(module) == "hf_spec.modeling_patches"]
    ours = [name for name in patches if name.startswith("hf_spec")]
    allowed = {"hf_spec.modeling_patches", "hf_spec.threads"}
    assert ours and {unit(name) for name in ours} == allowed


def test_the_library_has_few_rooms() -> None:
    rooms = {name.split(".")[1] for name in our_modules() if name.count(".") > 1}
    rooms -= {"tools", "modeling_patches"}
    assert {"core", "decoding", "methods"} <= rooms and len(rooms) <= 9, sorted(rooms)


def test_core_knows_neither_models_nor_files() -> None:
    core = [one for one in our_modules().items() if one[0].startswith("hf_spec.core")]
    assert len(core) >= 5
    assert [line for module in core for line in impurities(*module)] == []
