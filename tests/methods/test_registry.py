"""Methods are made known in one way, by name and by the type of their adapter."""

import dataclasses
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
