"""Refuses unsupported options by name, before any work is done."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from transformers import GenerationConfig

from hf_spec.decoding.auto import resolve_auto
from hf_spec.decoding.compiling import STATIC, ask_for_compiling
from hf_spec.decoding.config import warn_if_lossy
from hf_spec.drafting.options import ACCEPTANCE_RULES
from hf_spec.methods.registry import Method, get_method, methods
from hf_spec.modeling_patches.attention_masks import check_attention
from hf_spec.modeling_patches.support import (
    activated_loras,
    averaging_adapters,
    check_cache_stays,
    check_model,
)

_ONE_OF_TWO = "Leave one of the two out (assistant_strategy=None)."
#: Options of other decoding modes, and what to do without them.
_OTHER_MODES = {
    "prompt_lookup_num_tokens": (
        "Give assistant_strategy='prompt_lookup', with assistant_kwargs={'num_draft_tokens': ...} "
        "if its policy is not to choose how many tokens to draft."
    ),
    "max_matching_ngram_size": "Give assistant_kwargs={'max_ngram': ...} to prompt_lookup instead.",
    "use_mtp": "Drop it: assistant_strategy='mtp' drafts with the same layers.",
    "assistant_early_exit": "Drop it: assistant_strategy='layer_skip' drafts with some layers.",
    "speculation_type": "Drop it: the strategy alone names the drafter.",
    **dict.fromkeys(
        ("penalty_alpha", "dola_layers", "low_memory", "assistant_ensemble_weight",
         "constraints", "force_words_ids"), _ONE_OF_TWO,
    ),
}  # fmt: skip
#: Options of stock assisted decoding, of which each call has some value, and what to do instead.
_OF_ASSISTED = {
    "num_assistant_tokens": (
        "Give assistant_kwargs={'num_draft_tokens': ...} instead, or nothing: then a policy "
        "drafts as much as pays."
    ),
    "num_assistant_tokens_schedule": "Drop it: in each step a policy drafts as much as pays.",
    "assistant_confidence_threshold": "Drop it: in each step a policy drafts as much as pays.",
    **dict.fromkeys(
        ("assistant_lookbehind", "target_lookbehind"),
        "Drop it: an assistant has the model's tokenizer.",
    ),
}


#: What is wrong, if anything; the option, its value, why it is refused, and what to do.
Refusal = tuple[object, str, Any, str, str]


def validate_call(model: Any, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Raise on every option that ``decode`` would have to ignore; put a strategy for ``auto``, and
    the parsed options for those given.

    Raises:
        ValueError: naming the option, its value and what to do.
    """
    assistant = mode_kwargs.get("assistant_model")
    resolve_auto(model, config, assistant)
    method = get_method(config.assistant_strategy)
    options = method.parse_options(config.assistant_kwargs)
    warn_if_lossy(config.assistant_kwargs, ACCEPTANCE_RULES[options.acceptance])
    config.assistant_kwargs = options
    check_model(model)
    check_attention(model)
    check_cache_stays(model)
    _raise(config, _of_other_modes(model, config, method))
    if method.needs_assistant or assistant is not None:
        method.make_drafter(model, options, assistant)
    _raise(config, _of_the_call(config, mode_kwargs, method))
    _raise(config, _of_the_cache(model, config))
    _raise(config, _of_adapters(model))
    config.use_cache = True  # some models' own default is False
    ask_for_compiling(config)


def check_arguments(model: Any, strategy: Any, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option of a strategy is an argument of a call of ``generate``, and
    no argument of ``generate`` or of the model's forward."""
    for name in _own_names() & arguments.keys():
        if name not in inspect.signature(model.forward).parameters:
            raise ValueError(
                f"{name}={arguments[name]!r} beside assistant_strategy={strategy!r}: it is an "
                f"option of a strategy. Give assistant_kwargs={{{name!r}: {arguments[name]!r}}}."
            )


@cache
def _own_names() -> frozenset[str]:
    """Names of options of strategies that are no options of ``generate``."""
    known = methods().values()
    names = {name for method in known for name in (*method.option_names, *method.former_names)}
    return frozenset(name for name in names if not hasattr(GenerationConfig(), name))


def _raise(config: GenerationConfig, refusals: Iterable[Refusal]) -> None:
    for wrong, option, value, why, remedy in refusals:
        if wrong:
            strategy = config.assistant_strategy
            raise ValueError(
                f"{option}={value!r} with assistant_strategy={strategy!r}: {why} {remedy}"
            )


def _of_other_modes(model: Any, config: GenerationConfig, method: Method) -> Iterator[Refusal]:
    for option in ("num_beams", "num_beam_groups"):
        value = getattr(config, option, None) or 1
        yield value > 1, option, value, "beam search keeps several hypotheses per row.", _ONE_OF_TWO
    for option, remedy in _OTHER_MODES.items():
        value = getattr(config, option, None)
        wrong = value is not None and value is not False
        yield wrong, option, value, "it names another decoding method.", remedy
    defaults, own = GenerationConfig._get_default_generation_params(), model.generation_config
    for option, remedy in _OF_ASSISTED.items():
        if not method.drafter.drafts:
            remedy = "Drop it: this strategy drafts nothing."
        value = getattr(config, option, None)
        asked = value not in (None, defaults.get(option), getattr(own, option, None))
        wrong = asked and not config.is_assistant  # with this, the model drafts for another
        yield wrong, option, value, "it is for stock assisted decoding.", remedy


def _of_the_call(
    config: GenerationConfig, mode_kwargs: dict[str, Any], method: Method
) -> Iterator[Refusal]:
    tokenizer = mode_kwargs.get("assistant_tokenizer")
    why = "draft tokens are the model's own, so both have one tokenizer."
    kind, wrong = type(tokenizer).__name__, not _agree(tokenizer, mode_kwargs.get("tokenizer"))
    yield wrong, "assistant_tokenizer", kind, why, _ONE_OF_TWO
    for option in ("output_attentions", "output_hidden_states"):
        why = "a step runs draft tokens that plain generation never sees."
        remedy = "Run the model on the finished sequence to get them."
        yield getattr(config, option, None), option, True, why, remedy
    scale, why = config.guidance_scale, "classifier-free guidance runs the model token by token."
    yield (scale or 1) != 1, "guidance_scale", scale, why, _ONE_OF_TWO
    mark, why = type(config.watermarking_config).__name__, "its processor keeps a state per call."
    yield "SynthID" in mark, "watermarking_config", mark, why, _ONE_OF_TWO
    why = (
        "ranks with prompts of their own would run modules of the model at different times and "
        "wait for ever."
    )
    remedy = "Choose a strategy whose drafts run none, such as prompt_lookup."
    waits = mode_kwargs.get("synced_gpus") and method.drafter.runs
    yield waits, "synced_gpus", True, why, remedy


def _agree(assistants: Any, own: Any) -> bool:
    """Whether an assistant's tokenizer, if one is given, has the model's tokens, of which some are
    compared. Pipelines give both where the models' vocabularies are padded to different sizes."""
    if assistants is None or own is None or len(assistants) != len(own):
        return assistants is None
    some = [*range(0, len(own), max(len(own) // 64, 1))]
    return bool(assistants.convert_ids_to_tokens(some) == own.convert_ids_to_tokens(some))


def _of_the_cache(model: Any, config: GenerationConfig) -> Iterator[Refusal]:
    mixes = any(adapter.peft_type == "XLORA" for adapter in _adapters(model))
    remedy = "Set use_cache=True; in TRL's online DPO, generation_kwargs={'use_cache': True, ...}."
    if mixes:
        remedy = (
            "X-LoRA runs without it, as its scalings depend on the whole text: generate without a "
            "strategy, or with one of its LoRAs alone."
        )
    off = config.use_cache is False and (mixes or model.generation_config.use_cache is not False)
    yield off, "use_cache", False, "tree attention needs the cache.", remedy
    kind, why = config.cache_implementation, "strategies keep a cache of their own (TreeCache)."
    remedy = f"Leave it out, or give {STATIC!r} for compiled steps."
    yield kind not in (None, "dynamic", STATIC), "cache_implementation", kind, why, remedy


def _of_adapters(model: Any) -> Iterator[Refusal]:
    adapters = _adapters(model)
    # PeftModel.generate runs the base model's generate() with its own input preparation.
    caller = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if caller is not model and hasattr(caller, "active_peft_config"):
        adapters.append(caller.active_peft_config)
    remedy = "Disable the adapter, or generate without a strategy."
    for adapter in adapters:
        kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
        why = "prompt-learning adapters put virtual tokens into the cache."
        yield getattr(adapter, "is_prompt_learning", False), "peft_type", kind, why, remedy
    lily = averaging_adapters(model)
    why = (
        f"Lily ({', '.join(lily)}) weights its experts by a mean over all tokens of a forward, "
        "which are other ones in a forward of a tree."
    )
    yield lily, "peft_type", "LILY", why, remedy
    activated = activated_loras(model)
    why = (
        "PEFT applies an activated LoRA to the last tokens of each forward, which are other ones "
        "in a forward of a tree."
    )
    yield activated, "alora_invocation_tokens", ", ".join(activated), why, remedy


def _adapters(model: Any) -> list[Any]:
    return list((getattr(model, "peft_config", None) or {}).values())


def check_strategy(model: Any, config: GenerationConfig) -> None:
    """Raise the ValueErrors that ``generate()`` would raise with this config, without
    generating."""
    config = copy.copy(config)
    validate_call(model, config, {})
    method = get_method(config.assistant_strategy)
    method.make_drafter(model, config.assistant_kwargs)
