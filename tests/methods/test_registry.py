"""Methods are made known in one way, by name and by the type of their adapter."""

import dataclasses
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import hf_spec
from hf_spec.methods import registry
from hf_spec.methods.registry import get_method, methods, register_method


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(methods()))


def test_a_method_is_registered_once_and_again() -> None:
    class OwnDrafter(hf_spec.Drafter):
        pass

    own = dataclasses.replace(get_method("prompt_lookup"), name="own", drafter=OwnDrafter)
    register_method(own)
    register_method(own)
    assert get_method("own") is own and "own" in hf_spec.strategies()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"predictor": None}, "'bita' is that of .*BitaPredictor: choose another name"),
        ({"name": "half", "adapter_module": None}, "only one of adapter_config and adapter_module"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    before = methods()
    with pytest.raises(ValueError, match=message):
        register_method(dataclasses.replace(get_method("bita"), **fields))
    assert methods() == before


#: A package's only file. Without a ``PREDICTOR`` it cannot be imported.
MODULE = """
import hf_spec

class OwnDrafter(hf_spec.Drafter):
    pass

known = hf_spec.strategies()  # as a program that imports this one first would have it
METHOD = hf_spec.Method(
    name="installed", summary="of a package", options=hf_spec.DraftOptions, drafter=OwnDrafter
)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a package that names its method by an entry point."""
    entry = EntryPoint("installed", "installed_method:METHOD", "hf_spec.methods")
    monkeypatch.setattr(registry, "_discover", lambda left=[entry]: left)  # noqa: B006
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "installed_method", raising=False)
    (tmp_path / "installed_method.py").write_text(MODULE)
    return tmp_path / "installed_method.py"


@pytest.mark.parametrize("first", [False, True], ids=["by hf_spec", "by a program"])
def test_installed_packages_name_methods_by_entry_points(installed: Path, first: bool) -> None:
    """Also where the package's module is imported first, and asks for methods while it is."""
    if first:
        module: Any = __import__("installed_method")
        assert "installed" not in module.known
    assert hf_spec.strategies()["installed"] == "of a package"
    method = get_method("installed")
    assert method is sys.modules["installed_method"].METHOD  # type: ignore[attr-defined]
    # Its section of cards lies beside its file, as it is in no folder of a package.
    assert not method.card.is_file()
    (installed.parent / "installed.md").write_text("of a package")
    assert method.card.read_text() == "of a package"


def test_a_package_that_cannot_be_imported_costs_no_other_method(installed: Path) -> None:
    installed.write_text("raise RuntimeError('broken')")
    with pytest.warns(UserWarning, match="'installed' of an installed package is left out.*broken"):
        known = methods()
    assert "installed" not in known and "medusa" in known
    assert methods() == known
