"""``generate(custom_generate=hf_spec.generate)``: strategies by Transformers' own door for decoding
methods of others."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import utils
from transformers.generation.streamers import BaseStreamer

from hf_spec.decoding.loop import decode
from hf_spec.decoding.outputs import SpecGenerateOutput
from hf_spec.decoding.validate import validate_call
from hf_spec.drafting.options import AUTO
from hf_spec.modeling_patches.cache_name import CACHE


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    assistant_strategy: str | None = None,
    assistant_kwargs: dict[str, Any] | None = None,
    assistant_model: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool | None = None,
    **model_kwargs: Any,
) -> Tensor | SpecGenerateOutput:
    """Decode with a strategy: ``model.generate(**inputs, custom_generate=hf_spec.generate)``.

    ``hf_spec.generate(model, **inputs)`` is the same call.

    All arguments of ``generate`` work, as with ``assistant_strategy`` alone. A decoding method of
    one's own may call it, too: Transformers gives such a method neither ``assistant_model``,
    ``streamer`` nor ``tokenizer``, so that the first two are to be passed on by other ways.

    Args:
        input_ids: ``(batch, seq)``; like the three that follow, as ``generate`` prepares them. If
            one of these three is missing, ``model.generate`` is called, which prepares them.
        assistant_strategy: name of a strategy; None for that of the configuration, else ``auto``.
        assistant_kwargs: its options.
        assistant_model: the model that drafts, for ``draft_model``.
        streamer: gets the prompt, then tokens.
        synced_gpus: whether all ranks run forwards until the last one ends; None: if they share the
            model's weights by FSDP or DeepSpeed's stage 3, as in ``generate``.
        model_kwargs: inputs of the model's forward.

    Returns:
        What ``generate`` returns: ``(batch, seq)`` tokens, or an output with ``spec_stats``.

    Raises:
        ValueError: an option does not work with the strategy.
    """
    if logits_processor is None or stopping_criteria is None or generation_config is None:
        named = {
            "input_ids": input_ids, "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria, "generation_config": generation_config,
            "assistant_strategy": assistant_strategy, "assistant_kwargs": assistant_kwargs,
            "assistant_model": assistant_model, "streamer": streamer, "synced_gpus": synced_gpus,
        }  # fmt: skip
        named = {name: value for name, value in named.items() if value is not None}
        called: Any = model.generate
        return called(**named, **model_kwargs, custom_generate=generate)
    config: Any = generation_config
    cache = model_kwargs.get(CACHE)
    config.assistant_strategy = (
        assistant_strategy or getattr(config, "assistant_strategy", None) or AUTO
    )
    config.assistant_kwargs = assistant_kwargs or getattr(config, "assistant_kwargs", None)
    if synced_gpus is None:
        shared = utils.is_deepspeed_zero3_enabled() or utils.is_fsdp_managed_module(model)
        synced_gpus = shared and dist.is_initialized() and dist.get_world_size() > 1
    given = {"assistant_model": assistant_model, "synced_gpus": synced_gpus}
    validate_call(model, config, given)
    assert input_ids is not None
    if getattr(config, "_static_steps", False) and not getattr(cache, "_is_user_defined", False):
        model_kwargs.pop(CACHE, None)  # the static cache that ``generate`` has made
    if streamer is not None:
        streamer.put(input_ids.cpu())
    return decode(
        model, input_ids, logits_processor, stopping_criteria, config, streamer=streamer,
        assistant_model=assistant_model, synced_gpus=synced_gpus, **model_kwargs,
    )  # fmt: skip
