"""Compiled steps: when a call has them, and what it is then held to.

As in Transformers, ``cache_implementation="static"`` asks for them: on accelerators they are then
compiled unless ``disable_compile`` says otherwise, elsewhere if there is a ``compile_config``.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from transformers import CompileConfig, GenerationConfig

from hf_spec.drafting.drafter import Drafter
from hf_spec.model.graphs import Graphs

#: Value of ``cache_implementation``.
STATIC = "static"

#: Where Transformers compiles of itself.
_ACCELERATORS = ("cuda", "xpu", "neuron", "tpu")


def ask_for_compiling(config: GenerationConfig) -> None:
    """Note what a call's own config asks for, and take it out of Transformers' sight, which would
    allocate its own static cache."""
    if config.cache_implementation == STATIC:
        config.cache_implementation = None
        config._static_steps = True


def graphs_for(
    model: Any, config: GenerationConfig, drafter: Drafter, kind: Hashable
) -> Graphs | None:
    """Compiled code for a call's steps; None if they are not to be compiled.

    Args:
        model: of the call.
        config: what :func:`ask_for_compiling` has seen.
        drafter: does without pruning from here on where that is the policy's choice.
        kind: of its forwards: the strategy, its adapter.

    Raises:
        ValueError: what was asked for cannot be had in compiled steps.
    """
    asked = getattr(config, "_static_steps", False) and not config.disable_compile
    if not asked or (config.compile_config is None and model.device.type not in _ACCELERATORS):
        return None
    if drafter.prunes:
        raise ValueError(
            f"prune=True with cache_implementation={STATIC!r}: compiled steps have fixed shapes, "
            "and what is pruned differs from step to step. Give prune=False or 'auto', or leave "
            "cache_implementation out."
        )
    drafter.prunes = False
    return Graphs(model, config.compile_config or CompileConfig(), (kind, drafter.kind_of_forward))
