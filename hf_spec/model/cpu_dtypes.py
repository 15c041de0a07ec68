"""Which 16-bit dtypes the CPU has instructions for."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from modeling_patches.weights import placement

logger = logging.getLogger(__name__)

#: Operators that say whether oneDNN has products in a dtype.
_SUPPORTED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported",
}  # fmt: skip


def has_instructions(dtype: torch.dtype) -> bool | None:
    """Whether the CPU multiplies in this 16-bit dtype; None where this PyTorch does not say."""
    supported = getattr(torch.ops.mkldnn, _SUPPORTED[dtype], None)
    if supported is None or not torch.backends.mkldnn.is_available():
        return None
    return bool(supported())


def warn_if_slow(model: Any) -> None:
    """Log a warning, once per dtype, if a model computes in one that its CPU has no instructions
    for."""
    if getattr(model, "is_quantized", False):
        return
    at = placement(model)
    if at.device.type == "cpu" and at.dtype in _SUPPORTED:
        _warn(at.dtype)


@functools.cache
def _warn(dtype: torch.dtype) -> None:
    if has_instructions(dtype) is False:
        name = str(dtype).removeprefix("torch.")
        logger.warning(
            f"This CPU has no instructions for {name}, in which steps of several tokens take "
            "several times as long as in float32: load the model with dtype=torch.float32."
        )
