"""Code for captured graphs, by the backends of ``torch.compile``."""

from functools import partial
from typing import Any

import torch
from torch import fx
from transformers import CompileConfig

from hf_spec.core.checks import check_choice
from hf_spec.model.any_size import AnySize, Code
from hf_spec.model.captures import CUDA_GRAPHS
from hf_spec.model.repeats import compile_in_parts


def options_of(config: CompileConfig) -> dict[str, Any]:
    """The options of ``torch.compile``, its mode among them.

    Raises:
        ValueError: if there is no such backend, or if Inductor's ``freezing`` is on.
    """
    options = dict(config.options or {})
    if isinstance(config.backend, str) and config.backend != CUDA_GRAPHS:
        known = torch.compiler.list_backends(exclude_tags=())
        check_choice("backend of the CompileConfig", config.backend, known)
    if config.backend == "inductor":
        mode = torch._inductor.list_mode_options(config.mode) if config.mode is not None else {}
        options = {**mode, **options, "triton.cudagraphs": False}  # recorded by Graphs, as one
        if options.get("freezing") or torch._inductor.config.freezing:
            raise ValueError(
                "Inductor's freezing is on (options of the CompileConfig, or "
                "TORCHINDUCTOR_FREEZING=1): kept code would hold the values of weights, and of the "
                "first call's cache. Turn it off, or give disable_compile=True."
            )
    return options


def code_for(
    captured: fx.GraphModule, backend: str, options: dict[str, Any], parts: AnySize
) -> Code:  # fmt: skip
    """Code for a graph of tensors, by ``parts``, the :func:`compiled_parts` of earlier ones, where
    a backend allows it; it must not hold the model, as it is kept."""
    if backend in ("eager", "inductor"):
        code = compile_in_parts(captured, parts)
        if code is not None:
            return code
    if backend == "eager":  # runs the captured graph as it is
        return captured
    options = {**options, "guard_filter_fn": lambda guards: [False] * len(guards)}
    return torch.compile(captured, fullgraph=True, dynamic=False, backend=backend, options=options)


def compiled_parts(backend: str, options: dict[str, Any]) -> AnySize:
    """What compiles parts of graphs, or runs them as they are with the backend ``eager``."""
    if backend == "eager":
        return AnySize(lambda part, _: part)
    return AnySize(partial(torch._inductor.compile, options=options))
