"""Refuses unsupported options by name, before any work is done."""

from __future__ import annotations

import copy
from typing import Any

from transformers import GenerationConfig

from hf_spec.decoding.auto import resolve_auto
from hf_spec.decoding.compiling import STATIC, ask_for_compiling
from hf_spec.decoding.config import warn_if_lossy
from hf_spec.drafting.options import ACCEPTANCE_RULES
from hf_spec.methods.registry import get_method
from modeling_patches.support import activated_loras, check_cache_stays, check_model

#: Options of other decoding modes.
_OTHER_MODES = (
    "penalty_alpha", "dola_layers", "low_memory", "prompt_lookup_num_tokens",
    "assistant_early_exit", "assistant_ensemble_weight", "use_mtp", "speculation_type",
    "constraints", "force_words_ids",
)  # fmt: skip


def validate_call(model: Any, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Raise on every option that ``decode`` would have to ignore; put a strategy for ``auto``, and
    the parsed options for those given.

    Raises:
        ValueError: naming the option, its value and what to do.
    """
    assistant = mode_kwargs.get("assistant_model")
    resolve_auto(model, config, assistant)
    strategy = config.assistant_strategy
    method = get_method(strategy)
    options = method.parse_options(config.assistant_kwargs)
    warn_if_lossy(config.assistant_kwargs, ACCEPTANCE_RULES[options.acceptance])
    config.assistant_kwargs = options
    check_model(model)
    check_cache_stays(model)

    def refuse(
        wrong: object, option: str, value: Any, why: str, remedy: str = "Leave one of the two out."
    ) -> None:
        if wrong:
            raise ValueError(
                f"{option}={value!r} with assistant_strategy={strategy!r}: {why} {remedy}"
            )

    for option in ("num_beams", "num_beam_groups"):
        value = getattr(config, option, None) or 1
        refuse(value > 1, option, value, "beam search keeps several hypotheses per row.")
    for option in _OTHER_MODES:
        value = getattr(config, option, None)
        wrong = value is not None and value is not False
        refuse(wrong, option, value, "it names another decoding method.")
    if method.needs_assistant or assistant is not None:
        method.make_drafter(model, options, assistant)
    tokenizer = mode_kwargs.get("assistant_tokenizer")
    why = "draft tokens are the model's own, so both have one tokenizer."
    refuse(tokenizer is not None, "assistant_tokenizer", type(tokenizer).__name__, why)
    adapters = list((getattr(model, "peft_config", None) or {}).values())
    mixes = any(adapter.peft_type == "XLORA" for adapter in adapters)
    remedy = "Set use_cache=True."
    if mixes:
        remedy = (
            "X-LoRA runs without it, as its scalings depend on the whole text: generate without a "
            "strategy, or with one of its LoRAs alone."
        )
    off = config.use_cache is False and (mixes or model.generation_config.use_cache is not False)
    refuse(off, "use_cache", False, "tree attention needs the cache.", remedy)
    config.use_cache = True  # some models' own default is False
    kind = config.cache_implementation
    refuse(
        kind not in (None, "dynamic", STATIC), "cache_implementation", kind,
        "strategies keep a cache of their own (TreeCache).",
        f"Leave it out, or give {STATIC!r} for compiled steps.",
    )  # fmt: skip
    for option in ("output_attentions", "output_hidden_states"):
        refuse(
            getattr(config, option, None), option, True,
            "a step runs draft tokens that plain generation never sees.",
            "Run the model on the finished sequence to get them.",
        )  # fmt: skip
    scale, why = config.guidance_scale, "classifier-free guidance runs the model token by token."
    refuse((scale or 1) != 1, "guidance_scale", scale, why)
    mark = type(config.watermarking_config).__name__
    refuse("SynthID" in mark, "watermarking_config", mark, "its processor keeps a state per call.")
    refuse(
        mode_kwargs.get("synced_gpus") and method.drafter.runs, "synced_gpus", True,
        "ranks with prompts of their own would run modules of the model at different times and "
        "wait for ever.", "Choose a strategy whose drafts run none, such as prompt_lookup.",
    )  # fmt: skip
    # PeftModel.generate runs the base model's generate() with its own input preparation.
    caller = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if caller is not model and hasattr(caller, "active_peft_config"):
        adapters.append(caller.active_peft_config)
    remedy = "Disable the adapter, or generate without a strategy."
    for adapter in adapters:
        refuse(
            getattr(adapter, "is_prompt_learning", False), "peft_type",
            str(getattr(adapter.peft_type, "value", adapter.peft_type)),
            "prompt-learning adapters put virtual tokens into the cache.", remedy,
        )  # fmt: skip
    activated = activated_loras(model)
    refuse(
        activated, "alora_invocation_tokens", ", ".join(activated),
        "PEFT applies an activated LoRA to the last tokens of each forward, which are other ones "
        "in a forward of a tree.", remedy,
    )  # fmt: skip
    ask_for_compiling(config)


def check_strategy(model: Any, config: GenerationConfig) -> None:
    """Raise the ValueErrors that ``generate()`` would raise with this config, without
    generating."""
    config = copy.copy(config)
    validate_call(model, config, {})
    method = get_method(config.assistant_strategy)
    method.make_drafter(model, config.assistant_kwargs)
