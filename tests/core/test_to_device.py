import pytest
import torch
from torch import Tensor

from hf_spec.core.device import to_device


def test_the_host_waits_for_what_it_gets_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's non-blocking copy to the host returns before the numbers are there."""
    copied = []

    def to(self: Tensor, device: str, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
        copied.append((self.device.type, device, non_blocking))
        return self

    monkeypatch.setattr(Tensor, "to", to)
    to_device([1, 2], "meta")
    to_device(torch.zeros(2, device="meta"), "cpu")
    assert copied == [("cpu", "meta", True), ("meta", "cpu", False)]
