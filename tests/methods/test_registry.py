"""Methods are made known in one way, by name and by the type of their adapter."""

import dataclasses

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


def test_a_name_that_is_taken() -> None:
    other = dataclasses.replace(get_method("bita"), drafter=get_method("medusa").drafter)
    with pytest.raises(ValueError, match="'bita' is that of .*BitaDrafter: choose another name"):
        register_method(other)
    assert get_method("bita") is not other


def test_half_an_adapter() -> None:
    half = dataclasses.replace(get_method("bita"), name="half", adapter_module=None)
    with pytest.raises(ValueError, match="only one of adapter_config and adapter_module"):
        register_method(half)
    assert "half" not in methods()
