"""A CUDA graph without a GPU: a function is recorded once, and only the record runs again.

The record is what ``make_fx`` traces with real tensors, so whatever Python code computes, and every
tensor that is not an input, is a constant in it, as in a graph. Its results are in fixed memory,
and all others' are gone when it runs, as in a pool.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig

#: Keywords of ``generate`` for recorded steps.
RECORDED = {"compile_config": CompileConfig(backend="cudagraphs")}


class Replay:
    """See :class:`hf_spec.model.captures.Recorder`."""

    def __init__(self, device: torch.device):
        self._results: list[Tensor] = []

    def record(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Callable[[], Any], tuple[Tensor, ...]]:
        program = self._program(function, inputs)
        results = tuple(one.clone() for one in program(*inputs))
        self._results += results

        def replay() -> None:
            for one in self._results:
                one.fill_(torch.nan if one.is_floating_point() else 99)
            for one, found in zip(results, program(*inputs), strict=True):
                one.copy_(found)
            time.sleep(1e-3)  # lets other threads run

        return replay, results

    def _program(self, function: Any, inputs: Sequence[Tensor]) -> Any:
        return make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)


class Rerun(Replay):
    """The same for code whose kernels are no operations of PyTorch: it runs again, itself."""

    def _program(self, function: Any, inputs: Sequence[Tensor]) -> Any:
        return function
