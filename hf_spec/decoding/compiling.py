"""Compiled steps: when a call uses them, and which options they allow.

As in Transformers, ``cache_implementation="static"`` requests them. Steps are then compiled on
accelerators unless ``disable_compile`` is set, and elsewhere only with a ``compile_config``. On
CUDA they are recorded as CUDA graphs, compiled or not: a ``compile_config`` with the backend
``cudagraphs`` compiles nothing, so that it is a request by itself, whatever ``disable_compile``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel

from hf_spec.cache.buffers import SMALLEST
from hf_spec.core.checks import check_count
from hf_spec.drafting.drafter import Drafter
from hf_spec.model.captures import CUDA_GRAPHS
from hf_spec.model.graphs import Graphs
from hf_spec.modeling_patches.weights import placement

#: Value of ``cache_implementation``.
STATIC = "static"

#: Devices for which Transformers compiles by default.
_ACCELERATORS = ("cuda", "xpu", "neuron", "tpu")


def ask_for_compiling(config: GenerationConfig) -> None:
    """Record the request for compiled steps and remove it from the call's config, or else
    Transformers would allocate its own static cache."""
    if config.cache_implementation == STATIC:
        config.cache_implementation = None
        config._static_steps = True


def graphs_for(
    model: Any, config: GenerationConfig, drafter: Drafter, kind: Hashable, synced: bool = False
) -> Graphs | None:
    """Compiled code for a call's steps; None if they are not to be compiled.

    Args:
        config: a config that :func:`ask_for_compiling` has processed.
        drafter: the call's; it must not prune.
        kind: identifies its forwards: the strategy and its adapter.
        synced: whether several ranks run the model together, on batches of their own.

    Raises:
        ValueError: if it prunes, if ranks run together, or see :class:`Graphs`.
    """
    compile_config = config.compile_config
    records = compile_config is not None and compile_config.backend == CUDA_GRAPHS
    static = getattr(config, "_static_steps", False)
    by_default = model.device.type in _ACCELERATORS or compile_config is not None
    compiles = static and by_default and not config.disable_compile
    if not (records or compiles):
        return None
    asked = f"cache_implementation={STATIC!r}"
    if records:
        asked = f"compile_config=CompileConfig(backend={CUDA_GRAPHS!r})"
    if drafter.pruning is not None:
        raise ValueError(
            f"prune=True with {asked}: compiled and recorded steps have fixed shapes, and what is "
            "pruned differs from step to step. Leave one of the two out."
        )
    if synced:
        raise ValueError(
            f"synced_gpus=True (FSDP, DeepSpeed's stage 3) with {asked}: new code is tried by "
            "further forwards, for which ranks with other prompts would have to wait. Leave out "
            f"{asked}."
        )
    graphs = Graphs(model, compile_config or CompileConfig(), (kind, drafter.kind_of_forward))
    graphs.tell = getattr(config, "_tell_made", None)
    return graphs


def warm_up(
    model: PreTrainedModel,
    *,
    batch_sizes: Sequence[int] | int = (1,),
    max_length: int = SMALLEST,
    generation_config: GenerationConfig | None = None,
    progress: Callable[[int], object] | None = None,
    **kwargs: Any,
) -> int:
    """Compile, or record, in advance what calls with a static cache or a ``compile_config`` run.

    Later calls in the same process compile nothing if they stay within these sizes. With Inductor,
    later processes compile from its cache on disk.

    Args:
        model: a causal language model.
        batch_sizes: that or those of later calls; a shrinking batch goes through powers of two.
        max_length: largest number of prompt and output tokens; there is a graph for every power of
            two up to it, from 256.
        generation_config: as for ``generate``.
        progress: called with the number of graphs so far after each new graph.
        **kwargs: as for ``generate``: the strategy, its options, ``compile_config``, which on CUDA
            may ask for records (``backend="cudagraphs"``). Without one, ``torch.compile`` uses
            Transformers' defaults. Greedy steps are compiled, and with ``do_sample=True`` those of
            calls that sample.

    Returns:
        The number of graphs that were made.

    Raises:
        ValueError: if a size is below 1, if no strategy is named, or if ``generate`` raises it.
    """
    batch_sizes = [batch_sizes] if isinstance(batch_sizes, int) else batch_sizes
    for size in batch_sizes:
        check_count("batch_sizes", size)
    check_count("max_length", max_length)
    config = copy.deepcopy(generation_config or model.generation_config)
    config._warms_up = True
    given = {
        "compile_config": CompileConfig(), "do_sample": False, **kwargs,
        "cache_implementation": STATIC, "max_new_tokens": 8, "eos_token_id": None,
        "return_dict_in_generate": True,
    }  # fmt: skip
    # Transformers warns if it gets both a config and arguments for it.
    for name in [name for name in given if hasattr(config, name)]:
        setattr(config, name, given.pop(name))
    if config.assistant_strategy is None:
        raise ValueError(
            "warm_up without assistant_strategy: name the strategy of later calls, such as "
            "assistant_strategy='prompt_lookup'."
        )
    made, length = 0, SMALLEST
    if progress is not None:
        config._tell_made = lambda number: progress(made + number)
    while True:
        for batch_size in batch_sizes:
            # A prompt that needs buffers of exactly this size.
            device = placement(model).device
            order = torch.arange(max(length // 2 - 8, 8), device=device)
            ids = (1 + order % 2).repeat(batch_size, 1)
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, **given
            )
            made += output.spec_stats.details.get("compiled", {}).get("made", 0)
        if length >= max_length:
            return made
        length *= 2
