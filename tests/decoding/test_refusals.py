"""What a strategy cannot do is refused by name, with a remedy, before the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from architectures import build
from conftest import PAD, STRATEGIES, prompt, ragged
from peft import PromptTuningConfig, get_peft_model
from running import drafting
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
)

import hf_spec
from modeling_patches import generation_mode
from modeling_patches.cache_name import CACHE

Tiny = Callable[..., PreTrainedModel]
Spec = dict[str, Any]

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@contextmanager
def no_forward(model: torch.nn.Module) -> Iterator[None]:
    """Fail if the model, or an encoder in it, runs."""

    def fail(*_: Any) -> None:
        pytest.fail("the model ran before the call was refused")

    hooks = [module.register_forward_pre_hook(fail) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "num_beams": ({"num_beams": 2}, "num_beams=2.*Leave one"),
    "output_attentions": (
        {"output_attentions": True, "return_dict_in_generate": True},
        "output_attentions=True.*Run the model on the finished",
    ),
    "output_hidden_states": (
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "output_hidden_states=True.*Run the model on the finished",
    ),
    "offloaded": (
        {"cache_implementation": "offloaded"},
        "cache_implementation='offloaded'.*Leave it out",
    ),
    "quantized": ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
    "paged": ({"cache_implementation": "paged"}, "'paged'"),
    "prompt_lookup_num_tokens": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    "guidance_scale": ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    "use_cache": ({"use_cache": False}, "use_cache=False.*use_cache=True"),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
    "dola_layers": ({"dola_layers": "low"}, "dola_layers='low'"),
    "assistant_early_exit": ({"assistant_early_exit": 1}, "assistant_early_exit=1"),
    "num_beam_groups": ({"num_beam_groups": 2}, "num_beam_groups=2"),
    "force_words_ids": ({"force_words_ids": [[5]]}, "force_words_ids"),
    "synthid": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)},
        "watermarking_config='SynthID",
    ),
    "unknown option": (
        {"assistant_kwargs": {"tree_width": 3}},
        "assistant_kwargs.*no option 'tree_width'; its options are acceptance",
    ),
    "kwargs no dict": ({"assistant_kwargs": [1]}, "assistant_kwargs is a list: give a dict"),
    "a list of strategies": (
        {"assistant_strategy": ["ppd"]},
        r"assistant_strategy=\['ppd'\] is unknown: choose one of",
    ),
    "unknown strategy": (
        {"assistant_strategy": "oracle"},
        "assistant_strategy='oracle' is unknown: choose one of .*layer_skip.*prompt_lookup",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(tiny: Tiny, spec: Spec, case: str) -> None:
    kwargs, message = OPTIONS[case]
    model = tiny()
    with no_forward(model), pytest.raises(ValueError, match=message):
        model.generate(prompt(), **{**GREEDY, **spec, **kwargs})


def test_options_without_a_strategy(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    """They do nothing, which is said once; a strategy may be left out for a single call."""
    model = tiny()
    generation_mode._warn_of_unused.cache_clear()
    for _ in range(2):
        found = model.generate(prompt(), **GREEDY, assistant_kwargs={"max_ngram": 3})
    assert found.tolist() == model.generate(prompt(), **GREEDY).tolist()
    assert [one.message for one in caplog.records if "assistant" in one.message] == [
        "assistant_kwargs has no effect without assistant_strategy, which this call does not name."
    ]


def test_models_whose_own_default_is_no_cache(fresh: Tiny, spec: Spec) -> None:
    """MPT's: the caller has not asked for that."""
    model = fresh("mpt")
    plain = model.generate(prompt(), **GREEDY)
    model.config.use_cache = model.generation_config.use_cache = False
    assert model.generate(prompt(), **GREEDY, **spec).tolist() == plain.tolist()
    assert model.generation_config.use_cache is False


def test_assistant_model(tiny: Tiny, spec: Spec) -> None:
    model = tiny()
    with no_forward(model), pytest.raises(ValueError, match="assistant_model.*Leave one"):
        model.generate(prompt(), **GREEDY, **spec, assistant_model=tiny("llama_tied"))


def test_synced_gpus(tiny: Tiny) -> None:
    model = tiny()
    refused = pytest.raises(ValueError, match="synced_gpus=True.*drafts run none")
    with no_forward(model), refused:
        model.generate(prompt(), **GREEDY, **STRATEGIES["layer_skip"], synced_gpus=True)
    # On one rank it is a flag like any other.
    ours = model.generate(prompt(), **GREEDY, **STRATEGIES["prompt_lookup"], synced_gpus=False)
    assert ours.tolist() == model.generate(prompt(), **GREEDY).tolist()


def test_continuous_batching(tiny: Tiny, spec: Spec) -> None:
    model = tiny()
    with no_forward(model), pytest.raises(ValueError, match="generate_batch.*leave assistant"):
        model.generate_batch(
            prompt().tolist(), generation_config=GenerationConfig(**GREEDY, **spec)
        )


def test_typo_in_a_keyword(tiny: Tiny) -> None:
    """Stock Transformers' own error, with the strategy's keywords known and others not."""
    model = tiny()
    for kwargs in ({"asistant_strategy": "prompt_lookup"}, {"assistant_kwarg": {}}):
        with no_forward(model), pytest.raises(ValueError, match="model_kwargs.*not used"):
            model.generate(prompt(), **GREEDY, **kwargs)


def test_config_is_checked_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="'oracle' is unknown"):
        hf_spec.SpecConfig("oracle")
    with pytest.raises(ValueError, match="without assistant_strategy"):
        hf_spec.SpecConfig(assistant_kwargs={"max_depth": 3})
    with pytest.raises(ValueError, match="no option 'depth'"):
        hf_spec.SpecConfig("prompt_lookup", {"depth": 3})
    with pytest.raises(ValueError, match="max_depth=0"):
        hf_spec.SpecConfig("prompt_lookup", {"max_depth": 0})


def test_acceptance_that_does_not_fit(tiny: Tiny) -> None:
    model = tiny()
    for acceptance, message in (("rejection", "not sampled"), ("best", "choose one of match")):
        with no_forward(model), pytest.raises(ValueError, match=message):
            model.generate(
                prompt(), **GREEDY, assistant_strategy="prompt_lookup",
                assistant_kwargs={"acceptance": acceptance},
            )  # fmt: skip


def test_layer_skip_without_layers(tiny: Tiny) -> None:
    model = tiny()
    with no_forward(model), pytest.raises(ValueError, match="skip_attention.*hf-spec search"):
        model.generate(prompt(), **GREEDY, assistant_strategy="layer_skip")


def test_right_padding(tiny: Tiny, spec: Spec) -> None:
    model = tiny()
    batch = {key: value.flip(-1) for key, value in ragged().items()}
    with no_forward(model), pytest.raises(ValueError, match=r"padding in rows \[1, 2\].*left"):
        model.generate(**batch, **GREEDY, **spec)


def test_inputs_with_a_value_per_token(tiny: Tiny, spec: Spec) -> None:
    model = tiny("gpt2")
    with no_forward(model), pytest.raises(ValueError, match="'token_type_ids' has one value per"):
        model.generate(prompt(), token_type_ids=torch.ones_like(prompt()), **GREEDY, **spec)


_SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": PAD, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "rwkv": ({"attention_hidden_size": 32}, "Rwkv.*Generate without"),
    "recurrent_gemma": ({"num_hidden_layers": 3, "head_dim": 8}, "RecurrentGemma.*without"),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_models_that_cannot_forget(spec: Spec, model_type: str) -> None:
    fields, message = MODELS[model_type]
    config = AutoConfig.for_model(model_type, **{**_SMALL, **fields})
    model = AutoModelForCausalLM.from_config(config).eval()
    with no_forward(model), pytest.raises(ValueError, match=message):
        model.generate(prompt(), **GREEDY, **spec)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("openai-gpt", f"OpenAIGPTLMHeadModel.forward takes no {CACHE}.*Generate without"),
        ("cpmant", "CpmAntForCausalLM.forward takes no position_ids.*Generate without"),
        ("qwen4_exp_text", "Qwen4ExpForCausalLM: .* keeps positions of its own.*Generate without"),
        ("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM has a cache layer of type.*Generate with"),
    ],
)
def test_other_models(spec: Spec, model_type: str, message: str) -> None:
    model = build(model_type)
    with no_forward(model), pytest.raises(ValueError, match=message):
        model.generate(prompt(), **GREEDY, **spec)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("recurrent_gemma", "RecurrentGemmaForCausalLM.*Generate without"),
        ("gemma4_text", "Gemma4ForCausalLM has KV of several shapes.*Choose an adapter without it"),
        ("gemma3n_text", r"layers \[2, 3\] of Gemma3nForCausalLM have no KV.*Choose an adapter"),
    ],
)
def test_learned_states_for_every_layer(model_type: str, message: str) -> None:
    """Refused where the adapter is attached; one without such states is not."""
    model = build(model_type)
    with pytest.raises(ValueError, match=message):
        model.add_adapter(hf_spec.BitaConfig(), "refused")
    assert not getattr(model, "peft_config", None)
    if model_type != "recurrent_gemma":
        model.add_adapter(hf_spec.BitaConfig(prompt_depth="none"), "fits")
        plain = model.generate(prompt(), **GREEDY)
        ours = model.generate(prompt(), **GREEDY, **drafting("bita"))
        model.delete_adapter("fits")
        assert ours.tolist() == plain.tolist()


def test_encoder_decoder(spec: Spec) -> None:
    config = AutoConfig.for_model(
        "t5", vocab_size=61, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with no_forward(model), pytest.raises(ValueError, match="encoder-decoder.*Generate without"):
        model.generate(prompt(), **GREEDY, **spec)


def test_prompt_learning(fresh: Tiny, spec: Spec) -> None:
    model = get_peft_model(fresh(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with no_forward(model), pytest.raises(ValueError, match="PROMPT_TUNING.*Disable the adapter"):
        model.generate(input_ids=prompt(), **GREEDY, **spec)


def test_a_refused_call_leaves_the_model_as_it_was(tiny: Tiny, spec: Spec) -> None:
    """Also when it fails half way: patches are undone, the next call works."""
    model = tiny("bloom")
    expected = model.generate(prompt(), **GREEDY)

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 14:
            raise RuntimeError("half way")
        return scores

    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="half way"):
        model.generate(prompt(), **GREEDY, **spec, logits_processor=[fail])
    assert model.config._attn_implementation == before
    assert model.generate(prompt(), **GREEDY).tolist() == expected.tolist()
    assert model.generate(prompt(), **GREEDY, **spec).tolist() == expected.tolist()
