"""The dtype that the command line chooses, from what the device computes with."""

import logging
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from conftest import Tiny, prompt

from hf_spec.target import packed_weights
from hf_spec.tools import loading

pytestmark = pytest.mark.instructions


@pytest.fixture
def supported(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Dtypes that the CPU has instructions for: none at first."""
    names: set[str] = set()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for name in ("bf16", "fp16"):
        known = partial(names.__contains__, name)
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", known, raising=False)
    packed_weights._warn.cache_clear()
    yield names
    packed_weights._warn.cache_clear()


@pytest.mark.parametrize(
    ("device", "names", "wanted"),
    [("cpu", {"bf16"}, "bfloat16"), ("cpu", set(), "float32"), ("cuda:1", set(), "bfloat16")],
)
def test_native_dtype(
    supported: set[str], caplog: pytest.LogCaptureFixture, device: str, names: set[str], wanted: str
) -> None:
    supported.update(names)
    with caplog.at_level(logging.WARNING):
        assert loading.native_dtype(device) == wanted
    assert ("no instructions for bfloat16" in caplog.text) == (wanted == "float32")


def test_a_dtype_without_instructions_is_warned_of_once(
    fresh: Tiny, supported: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = fresh("llama")

    def warnings(dtype: torch.dtype) -> list[str]:
        caplog.clear()
        model.to(dtype).generate(prompt(), max_new_tokens=2, assistant_strategy="prompt_lookup")
        return [one.getMessage() for one in caplog.records if "no instructions" in one.message]

    assert warnings(torch.float32) == []
    (line,) = warnings(torch.bfloat16)
    assert "no instructions for bfloat16" in line and "dtype=torch.float32" in line
    assert warnings(torch.bfloat16) == []
    model.is_quantized = True  # then what embeddings are in says little
    assert warnings(torch.float16) == []
    model.is_quantized = False
    (line,) = warnings(torch.float16)
    assert "no instructions for float16" in line
    supported.add("bf16")
    packed_weights._warn.cache_clear()
    assert warnings(torch.bfloat16) == []


@pytest.mark.parametrize("way", ["around the call", "in the forward"])
def test_autocast_without_instructions_is_warned_of(
    fresh: Tiny, supported: set[str], caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """The parameters are float32; accelerate turns it on within the forward."""
    model, casts = fresh("llama"), torch.autocast("cpu", torch.bfloat16)
    call = partial(model.generate, prompt(), max_new_tokens=2, assistant_strategy="prompt_lookup")
    call()
    assert "no instructions" not in caplog.text
    if way == "in the forward":
        model.forward = casts(model.forward)
    else:
        call = casts(call)
    call()
    assert "no instructions for bfloat16" in caplog.text and "turn autocast off" in caplog.text
