"""Every option of ``generate()`` is honored, refused by name, or of no effect without a strategy.

An option that a newer Transformers adds is in none of these lists, and fails here until somebody
has looked at it.
"""

import functools
import inspect
from typing import Any

import pytest
import torch
from adapter_oracle import added
from conftest import EOS, PAD, STRATEGIES, Tiny, check_same, prompt
from running import no_forward
from transformers import CompileConfig, GenerationConfig, GenerationMixin, WatermarkingConfig

import hf_spec
from hf_spec.decoding.call import STATIC
from hf_spec.methods.registry import methods

#: Options that mean what they mean in plain generation, with values that matter; a call has those
#: of one line.
HONORED: list[dict[str, Any]] = [
    {"max_length": 18, "min_length": 16, "eos_token_id": list(range(3, 40)), "pad_token_id": PAD},
    {"max_new_tokens": 9, "min_new_tokens": 6, "eos_token_id": list(range(3, 40))},
    {"max_time": 60.0, "use_cache": True, "cache_implementation": "dynamic", "bos_token_id": 3},
    {"compile_config": CompileConfig(), "disable_compile": True, "prefill_chunk_size": 5},
    {"do_sample": False, "repetition_penalty": 1.3, "encoder_repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8, "min_p": 0.01}, {"top_h": 0.5},
    {"typical_p": 0.7, "renormalize_logits": True}, {"epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.01, "remove_invalid_values": True},
    {"watermarking_config": WatermarkingConfig()},
    {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "sequence_bias": {(5,): 3.0}},
    {"bad_words_ids": [[5], [6, 7]], "suppress_tokens": [8, 9], "begin_suppress_tokens": [10, 11]},
    {"forced_bos_token_id": 5, "forced_eos_token_id": EOS},
    {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": EOS},
    {
        "is_assistant": True, "assistant_confidence_threshold": 0.3, "num_return_sequences": 1,
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    },
]  # fmt: skip
#: These need a tokenizer: tests/decoding/test_generate.py; the second changes the prompt before.
WITH_TOKENIZER = {"stop_strings", "token_healing"}

#: Options that are refused, with a value that is.
REFUSED: dict[str, Any] = {
    "num_beams": 2, "num_beam_groups": 2, "constraints": ["..."], "force_words_ids": [[5]],
    "penalty_alpha": 0.6, "dola_layers": "low", "low_memory": True, "guidance_scale": 1.5,
    "prompt_lookup_num_tokens": 3, "assistant_early_exit": 1, "assistant_ensemble_weight": 0.5,
    "use_mtp": True, "speculation_type": "dflash", "output_attentions": True,
    "output_hidden_states": True, "max_matching_ngram_size": 3, "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic", "assistant_lookbehind": 3, "target_lookbehind": 3,
}  # fmt: skip

#: Options that only say more about one of those, about another kind of model, or about the config
#: itself: plain generation of a decoder ignores them.
WITHOUT_EFFECT: dict[str, Any] = {
    "early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 0.5,
    "decoder_start_token_id": 5, "cache_config": {"nbits": 4}, "max_cache_len": 400,
    "continuous_batching_config": None, "transformers_version": "5.0.0",
    "_from_model_config": False,
}  # fmt: skip

#: Arguments of ``generate()`` itself; the rest go to the configuration or the model.
ARGUMENTS = {
    "inputs", "generation_config", "logits_processor", "stopping_criteria",
    "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model", "streamer",
    "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate",
    "trust_remote_code", "kwargs",
}  # fmt: skip

SPEC = STRATEGIES["prompt_lookup"]


def test_no_option_is_overlooked() -> None:
    honored = {name for options in HONORED for name in options} | WITH_TOKENIZER
    known = [*honored, *REFUSED, *WITHOUT_EFFECT]
    assert len(known) == len(set(known))
    assert set(vars(GenerationConfig())) <= set(known)
    assert inspect.signature(GenerationMixin.generate).parameters.keys() - {"self"} <= ARGUMENTS


@pytest.mark.parametrize("option", REFUSED)
def test_refused(tiny: Tiny, option: str) -> None:
    """By name, with a remedy, before the model runs."""
    message = rf"^{option}=.* with assistant_strategy=.*\. (Leave|Run|Set|Drop|Give) "
    settings = {"max_new_tokens": 4, "return_dict_in_generate": True, **SPEC}
    with no_forward(tiny()), pytest.raises(ValueError, match=message):
        tiny().generate(prompt(), **settings, **{option: REFUSED[option]})


def test_options_of_the_model_itself(fresh: Tiny) -> None:
    """Those of assisted decoding in a repository's configuration are not the caller's."""
    model = fresh()
    model.generation_config.num_assistant_tokens = 5
    assert same(model, max_new_tokens=4)
    with pytest.raises(ValueError, match="num_assistant_tokens=6.*'num_draft_tokens'"):
        model.generate(prompt(), max_new_tokens=4, num_assistant_tokens=6, **SPEC)
    with pytest.raises(ValueError, match="assistant_confidence_threshold=0.3.*a policy"):
        model.generate(prompt(), max_new_tokens=4, assistant_confidence_threshold=0.3, **SPEC)


@pytest.mark.parametrize("strategy", ["prompt_lookup", "auto", "plain", "medusa", "eagle3"])
def test_what_is_recommended_works(tiny: Tiny, fresh: Tiny, strategy: str) -> None:
    """Whatever a refusal of ``num_assistant_tokens`` says instead, in a call and in a config."""
    model = fresh()
    if methods().get(strategy) and methods()[strategy].needs_adapter:
        added(model, methods()[strategy].adapter_config(), std=0.1)
    call = {"max_new_tokens": 4, "assistant_strategy": strategy}
    with pytest.raises(ValueError, match="num_assistant_tokens=5 with") as refusal:
        model.generate(prompt(), num_assistant_tokens=5, **call)
    given = {"num_draft_tokens": 5} if "'num_draft_tokens': ..." in str(refusal.value) else {}
    assert bool(given) == (strategy != "plain")
    del call["max_new_tokens"]
    check_same(model, {**call, "assistant_kwargs": given}, prompt(), max_new_tokens=4)
    config = hf_spec.SpecConfig(strategy, given)
    check_same(model, {"generation_config": config}, prompt(), max_new_tokens=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_ngram": 3},
            r"=3 beside assistant_strategy='prompt_lookup'.*\{'max_ngram': 3\}",
        ),
        ({"adapter": "org/name"}, r"Give assistant_kwargs=\{'adapter': 'org/name'\}\."),
        ({"max_nodes": 3}, "max_nodes=3 beside assistant_strategy="),
        ({"max_ngrams": 3}, r"=3 \(did you mean 'max_ngram'\?\) beside .*\{'max_ngram': 3\}\."),
    ],
)
def test_options_of_a_strategy_beside_it(tiny: Tiny, given: dict[str, Any], message: str) -> None:
    model = tiny()
    calls: list[Any] = [
        model.generate,
        functools.partial(model.generate, custom_generate=hf_spec.generate),
        functools.partial(hf_spec.generate, model),
    ]
    for generate in calls:
        with no_forward(model), pytest.raises(ValueError, match=message):
            generate(prompt(), assistant_strategy="prompt_lookup", **given)
    with pytest.raises(ValueError, match=message):
        hf_spec.SpecConfig("prompt_lookup", **given)
    config = GenerationConfig(assistant_strategy="prompt_lookup", **given)
    with no_forward(model), pytest.raises(ValueError, match=message):
        model.generate(prompt(), generation_config=config)
    with pytest.raises(ValueError, match="maximum"):  # unknown to all: as Transformers has it
        model.generate(prompt(), assistant_strategy="prompt_lookup", maximum=3)


def test_a_misspelled_option_beside_a_strategy() -> None:
    """Files of others may have any fields, and keep them."""
    with pytest.raises(ValueError, match=r"'max_new_tokns' \(did you mean 'max_new_tokens'\?\)"):
        hf_spec.SpecConfig("prompt_lookup", max_new_tokns=3)
    given = {"assistant_strategy": "prompt_lookup", "maximum": 3, "max_new_tokens": 4}
    found = hf_spec.SpecConfig.from_dict(given)
    assert (found.maximum, found.max_new_tokens) == (3, 4)
    with pytest.raises(ValueError, match="no option 'most'"):
        hf_spec.SpecConfig.from_dict(given, most=3)


def same(model: Any, **options: Any) -> bool:
    """Whether a sampled call with a seed gives what plain generation gives, with these options."""
    found = []
    for spec in ({}, SPEC):
        torch.manual_seed(0)
        found.append(model.generate(prompt(), **{"do_sample": True, **options, **spec}))
    sequences = [one if isinstance(one, torch.Tensor) else one.sequences for one in found]
    return torch.equal(*sequences)


@pytest.mark.parametrize("options", HONORED, ids=lambda options: "-".join(options))
def test_honored(tiny: Tiny, options: dict[str, Any]) -> None:
    length = {} if "max_length" in options else {"max_new_tokens": 16}
    assert same(tiny(), **{**length, **options})


def test_without_effect(tiny: Tiny) -> None:
    assert same(tiny(), max_new_tokens=16, **WITHOUT_EFFECT)
    assert same(tiny(), max_new_tokens=16, cache_implementation=STATIC, max_cache_len=400)
