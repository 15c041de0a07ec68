"""What a wheel holds: all of the packages, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hf_spec

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.environment

PACKAGES = ("hf_spec", "modeling_patches", "hub_cards")
LEFT_OUT = ("__pycache__", "custom_generate")


def shipped() -> set[str]:
    """Files of the packages, but those that are made while working."""
    files = {path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    relative = {path.relative_to(ROOT) for path in files}
    adapters = Path("hub_cards/adapters")
    return {
        str(path if path.parts[0] == "hf_spec" else Path("hf_spec", path))
        for path in relative
        if not set(LEFT_OUT) & set(path.parts) or path.parts[0] == "hub_cards"
        if path.suffix != ".pyc" and adapters not in path.parents
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name)  # with what is made while working
    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", program, str(target)],
        cwd=source, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (file,) = target.iterdir()
    return zipfile.ZipFile(file)


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
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


def test_the_version_comes_from_one_place(wheel):
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    assert f"\nVersion: {hf_spec.__version__}\n" in wheel.read(metadata).decode()
