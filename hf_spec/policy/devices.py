"""Names of devices for people and stored measurements."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch


@cache
def device_name(device: torch.device) -> str:
    """The hardware's name: ``NVIDIA H200``, or the processor's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@cache
def cpu_name() -> str:
    """The processor's model."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
