"""What is installed: all of the packages and nothing else, small, and with what they import."""

import ast
import configparser
import re
import shutil
import subprocess
import sys
import venv
import zipfile
import zlib
from functools import cache
from pathlib import Path

import pytest

import hf_spec

ROOT = Path(__file__).parent.parent
PACKAGES = ("hf_spec", "modeling_patches", "hub_cards")
LEFT_OUT = ("__pycache__", "custom_generate")
#: Bytes of a wheel, and of its code and texts.
LARGEST, LARGEST_TEXT = 12_000_000, 800_000
#: Imported where they are, and not declared: Triton comes with a PyTorch for GPUs, DeepSpeed is
#: asked for by a user's configuration of Accelerate, matplotlib and pandas by whoever wants a plot
#: or a frame, FastAPI comes with Transformers' server.
OPTIONAL = {"triton", "deepspeed", "matplotlib", "pandas", "fastapi"}


def installed_as(path: Path) -> Path:
    """Where a path of the repository lies in site-packages."""
    return path if path.parts[0] == "hf_spec" else Path("hf_spec", path)


def shipped() -> set[str]:
    """Files of the packages, but those that are made while working."""
    files = {path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    relative = {path.relative_to(ROOT) for path in files}
    adapters = Path("hub_cards/adapters")
    return {
        str(installed_as(path))
        for path in relative
        if not set(LEFT_OUT) & set(path.parts) or path.parts[0] == "hub_cards"
        if path.suffix != ".pyc" and adapters not in path.parents
    }


@cache
def setup() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", encoding="utf-8")
    return found


def listed(section: str, name: str) -> list[str]:
    """The lines of an option of setup.cfg."""
    lines = (line.partition("#")[0].strip() for line in setup()[section][name].splitlines())
    return [line for line in lines if line]


def packages() -> dict[str, Path]:
    """The folder of each package, by its name once installed."""
    folders = [one.parent for name in PACKAGES for one in (ROOT / name).rglob("__init__.py")]
    return {".".join(installed_as(one.relative_to(ROOT)).parts): one for one in folders}


def files_of(name: str, folder: Path) -> list[Path]:
    """What setup.cfg takes of a package, beside its modules."""
    data = setup()["options.package_data"]
    patterns = [one for kind in ("*", name) if kind in data for one in data[kind].split(", ")]
    return [path for one in patterns for path in folder.glob(one) if path.is_file()]


def test_setup_lists_the_packages_that_are_there() -> None:
    assert listed("options", "packages") == sorted(packages())


def test_a_wheel_is_small() -> None:
    """Its files as a wheel has them, compressed; the model takes most."""
    found = {path for name, folder in packages().items() for path in files_of(name, folder)}
    found |= {path for folder in packages().values() for path in folder.glob("*.py")}
    sizes = {path: len(zlib.compress(path.read_bytes(), 6)) for path in found}
    assert {str(installed_as(path.relative_to(ROOT))) for path in found} == shipped()
    text = {path: size for path, size in sizes.items() if path.suffix != ".safetensors"}
    assert sum(text.values()) < LARGEST_TEXT, sorted(text, key=text.__getitem__)[-3:]
    assert sum(sizes.values()) < LARGEST, sorted(sizes, key=sizes.__getitem__)[-3:]
    shipped_adapters = {path.parent.name for path in found if path.name == "adapter_config.json"}
    assert shipped_adapters == {"bita", "medusa"}


def imported(path: Path) -> set[str]:
    """Packages of others that a module imports anywhere, lazily or not."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    found = {name.partition(".")[0] for name in names}
    return found - sys.stdlib_module_names - {"hf_spec"}


def required(lines: list[str]) -> set[str]:
    """The modules of requirements; names differ by hyphens, with one exception."""
    names = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}
    return {{"pyyaml": "yaml"}.get(name, name) for name in names}


def test_a_clone_hides_the_package(tmp_path: Path) -> None:
    """Without an editable install, as if another copy were installed: Python finds what runs in the
    clone's folder, and that is whole."""
    others = [path for path in sys.path if path.endswith("site-packages")]
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in PACKAGES:
        (clone / name).symlink_to(ROOT / name, target_is_directory=True)
    program = (
        f"import sys; sys.path += {others!r}\n"
        "import hf_spec, hf_spec.modeling_patches.weights as w\n"
        "from importlib.resources import files\n"
        "assert (files('hf_spec.hub_cards') / 'adapter_card.md').is_file()\n"
        "assert hf_spec.strategies()\n"
        "print(w.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).samefile(ROOT / "modeling_patches" / "weights.py")


def test_what_is_imported_is_declared() -> None:
    """Of the library in install_requires, of the tools there or in the extra that they need."""
    needed = required(listed("options", "install_requires"))
    extras = setup()["options.extras_require"]
    more = {name for extra in extras for name in required(listed("options.extras_require", extra))}
    used: set[str] = set()
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        of_tools = "tools" in path.relative_to(ROOT).parts
        found = imported(path)
        assert found <= needed | OPTIONAL | (more if of_tools else set()), path
        used |= found
    assert needed <= used, "declared, and imported nowhere"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name)  # with what is made while working
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", program, str(target)],
        cwd=source, check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    (file,) = target.iterdir()
    return file


@pytest.mark.environment
def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    assert wheel.stat().st_size < LARGEST
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == shipped()
    assert {
        "hf_spec/py.typed",
        "hf_spec/tools/demo/model/model.safetensors",
        "hf_spec/tools/demo/adapters/medusa/adapter_model.safetensors",
        "hf_spec/methods/medusa.md",
        "hf_spec/hub_cards/adapter_card.md",
        "hf_spec/hub_cards/custom_generate/generate.py",
        "hf_spec/modeling_patches/weights.py",
    } <= names


@pytest.mark.environment
def test_its_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(metadata).decode()
    for line in (
        f"Version: {hf_spec.__version__}", "License-Expression: Apache-2.0",
        "License-File: LICENSE", "Author: The hf_spec contributors",
    ):  # fmt: skip
        assert f"\n{line}\n" in text
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", text, re.MULTILINE))
    assert extras == {"cli", "search", "train", "serve", "all"}


#: A program of a user who has folders of these names.
BESIDE_OTHERS = """\
import modeling_patches, hub_cards
import hf_spec
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer

assert modeling_patches.MINE and hub_cards.MINE
print(hf_spec.__file__)
demo = Path(hf_spec.__file__).parent / "tools" / "demo"
model = AutoModelForCausalLM.from_pretrained(demo / "model", dtype="float32")
model.load_adapter(str(demo / "adapters" / "medusa"))
inputs = AutoTokenizer.from_pretrained(demo / "model")("class Lake", return_tensors="pt")
config = hf_spec.SpecConfig.from_pretrained(demo / "adapters" / "medusa", max_new_tokens=8)
drafted, plain = (model.generate(**inputs, generation_config=config, assistant_strategy=name)
                  for name in ("medusa", None))
assert drafted.tolist() == plain.tolist()
"""


@pytest.mark.environment
@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_installed_beside_folders_of_the_same_names(
    source: Path, wheel: Path, tmp_path: Path, editable: bool
) -> None:
    """In an environment with what the package needs, and nothing else of this repository."""
    made = tmp_path / "env"
    venv.create(made, symlinks=True)
    python = made / "bin" / "python"
    what = ["--no-build-isolation", "--editable", str(source)] if editable else [str(wheel)]
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site,) = made.glob("lib/python*/site-packages")
    # Their own .pth files, such as that of this repository, are not read from there.
    (site / "others.pth").write_text("\n".join(others))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", *what],
        check=True, capture_output=True, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    work = tmp_path / "work"
    for name in PACKAGES[1:]:
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text("MINE = True")
    (work / "program.py").write_text(BESIDE_OTHERS)
    done = subprocess.run(
        [python, "program.py"], cwd=work, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(source if editable else site))
    done = subprocess.run(
        [made / "bin" / "hf-spec", "demo", "--limit", "1", "--max-new-tokens", "8"],
        cwd=work, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Every output equals plain generate's." in done.stdout
    assert {path.name for path in work.iterdir()} >= {"hf-spec-demo"}
