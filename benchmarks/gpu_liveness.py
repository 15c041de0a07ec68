"""A pytest plugin: PyTorch 2.13 and newer check that inputs of CUDA graphs exist when they run."""

import inspect
from typing import Any

import torch

_begin: Any = torch.cuda.CUDAGraph.capture_begin


def _checked(self: Any, *args: Any, **kwargs: Any) -> None:
    _begin(self, *args, **kwargs, check_input_liveness=True)


if "check_input_liveness" in inspect.signature(_begin).parameters:
    torch.cuda.CUDAGraph.capture_begin = _checked  # type: ignore[method-assign]
