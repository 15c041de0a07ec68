"""Whether a CPU has instructions for the dtype that a model computes in."""

import functools
import logging
from typing import Any

import torch

from hf_spec.modeling_patches.weights import placement

logger = logging.getLogger(__name__)

#: Operators that say whether oneDNN has products in a dtype on this CPU.
_SUPPORTED = {
    "torch.bfloat16": "_is_mkldnn_bf16_supported", "torch.float16": "_is_mkldnn_fp16_supported",
}  # fmt: skip


def has_instructions(dtype: torch.dtype) -> bool | None:
    """Whether the CPU multiplies in this 16-bit dtype; None where this PyTorch does not say."""
    supported = getattr(torch.ops.mkldnn, _SUPPORTED[str(dtype)], None)
    if supported is None or not torch.backends.mkldnn.is_available():
        return None
    return bool(supported())


def warn_if_slow(model: Any, cache: Any = None) -> None:
    """Log a warning, once per dtype, if a model computes in one that its CPU has no instructions
    for.

    Args:
        cache: what its forward has made. Autocast within the forward shows in its values only.
    """
    at = placement(model)
    if at.device.type != "cpu" or getattr(model, "is_quantized", False):
        return
    values = (getattr(layer, "values", None) for layer in getattr(cache, "layers", ()))
    dtype = next((one.dtype for one in values if one is not None), at.dtype)
    remedy = "load the model with dtype=torch.float32"
    if dtype != at.dtype:
        remedy = "the model is in another, so turn autocast off (Trainer, TRL: bf16=False)"
    _warn(dtype, remedy)


@functools.cache
def _warn(dtype: torch.dtype, remedy: str) -> None:
    if str(dtype) in _SUPPORTED and has_instructions(dtype) is False:
        logger.warning(
            f"This CPU has no instructions for {str(dtype).removeprefix('torch.')}, in which steps "
            f"of several tokens take several times as long as in float32: {remedy}."
        )
