"""The dtype that the command line chooses, from what the device computes with."""

from __future__ import annotations

import logging

import pytest
import torch

from hf_spec.model import loading


@pytest.mark.parametrize(
    ("device", "instructions", "wanted"),
    [("cpu", True, "bfloat16"), ("cpu", False, "float32"), ("cuda:1", False, "bfloat16")],
)
def test_native_dtype(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str,
    instructions: bool, wanted: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: instructions)
    with caplog.at_level(logging.WARNING):
        assert loading.native_dtype(device) == wanted
    assert ("no instructions for bfloat16" in caplog.text) == (wanted == "float32")
