"""What a strategy cannot do is refused by name, with a remedy, before the model runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from conftest import STRATEGIES, Tiny, check_same, prompt, ragged
from peft import LoraConfig, PromptTuningConfig, XLoraConfig, get_peft_model
from running import drafting, no_forward
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    SynthIDTextWatermarkingConfig,
)

import hf_spec
from modeling_patches import generation_mode
from modeling_patches.cache_name import CACHE

Spec = dict[str, Any]

GREEDY = {"max_new_tokens": 8, "do_sample": False}


#: Beside those of test_every_option.py and tests/methods/test_options.py.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'.*Leave it out"),
    ({"cache_implementation": "paged"}, "'paged'"),
    ({"use_cache": False}, "use_cache=False.*Set use_cache=True; in TRL.*generation_kwargs="),
    ({"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)},
     "watermarking_config='SynthID"),
    ({"assistant_strategy": "layer_skip", "assistant_kwargs": {}}, "skip_attention.*hf-spec sea"),
    ({"assistant_kwargs": {"tree_width": 3}}, "assistant_kwargs.*no option 'tree_width'; its opt"),
    ({"assistant_kwargs": [1]}, "assistant_kwargs is a list: give a dict"),
    ({"assistant_strategy": "promptlookup"}, r"did you mean 'prompt_lookup'\?\): choose"),
    ({"assistant_strategy": "autom"}, r"did you mean 'auto'\?\): choose one of .*, space, auto\."),
    ({"assistant_strategy": ["ppd"]}, r"assistant_strategy=\['ppd'\]: choose one of"),
    ({"assistant_strategy": "oracle"},
     "assistant_strategy='oracle': choose one of .*layer_skip.*prompt_lookup"),
]  # fmt: skip


@pytest.mark.parametrize(("kwargs", "message"), OPTIONS)
def test_options(tiny: Tiny, kwargs: dict[str, Any], message: str) -> None:
    spec = STRATEGIES["prompt_lookup"]
    with no_forward(tiny()), pytest.raises(ValueError, match=message):
        tiny().generate(prompt(), **{**GREEDY, **spec, **kwargs})


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("use_mtp", True, "assistant_strategy='mtp'"),
        ("speculation_type", "dflash", "the strategy alone"),
        ("low_memory", True, "Leave one"),
        ("prompt_lookup_num_tokens", 5, "assistant_strategy='prompt_lookup'"),
        ("max_matching_ngram_size", 2, "assistant_kwargs={'max_ngram'"),
    ],
)
def test_modes_that_not_every_release_has(
    tiny: Tiny, spec: Spec, option: str, value: Any, remedy: str
) -> None:
    """A configuration keeps options that its release does not know."""
    model, config = tiny(), GenerationConfig(**GREEDY, **spec)
    setattr(config, option, value)
    with no_forward(model), pytest.raises(ValueError, match=f"{option}={value!r}.*{remedy}"):
        model.generate(prompt(), generation_config=config)


def test_options_without_a_strategy(
    tiny: Tiny, fresh: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    """They do nothing, which is said once; a strategy may be left out for a single call."""
    generation_mode._warn_of_unused.cache_clear()
    model = fresh()
    model.generation_config.update(assistant_strategy="plain", assistant_kwargs={"drafting": "x"})
    model.generate(prompt(), **GREEDY, assistant_strategy=None)
    assert not caplog.records
    model = tiny()
    config = GenerationConfig(assistant_strategy="plain", assistant_kwargs={"drafting": "always"})
    model.generate(prompt(), **GREEDY, generation_config=config, assistant_strategy=None)
    assert not [one for one in caplog.records if "assistant_kwargs" in one.message]
    caplog.clear()
    for _ in range(2):
        found = model.generate(prompt(), **GREEDY, assistant_kwargs={"max_ngram": 3})
    assert found.tolist() == model.generate(prompt(), **GREEDY).tolist()
    assert [one.message for one in caplog.records if "assistant" in one.message] == [
        "assistant_kwargs has no effect without assistant_strategy, which this call does not name."
    ]


def test_models_whose_own_default_is_no_cache(fresh: Tiny, spec: Spec) -> None:
    """The caller has not asked for that."""
    model = fresh()
    plain = model.generate(prompt(), **GREEDY)
    model.config.use_cache = model.generation_config.use_cache = False
    assert model.generate(prompt(), **GREEDY, **spec).tolist() == plain.tolist()
    assert model.generation_config.use_cache is False


def test_other_ways_to_generate(tiny: Tiny) -> None:
    model, spec = tiny(), STRATEGIES["prompt_lookup"]
    with no_forward(model):
        with pytest.raises(ValueError, match="assistant_model.*Leave one"):
            model.generate(prompt(), **GREEDY, **spec, assistant_model=tiny("llama_tied"))
        with pytest.raises(ValueError, match="synced_gpus=True.*drafts run none"):
            model.generate(prompt(), **GREEDY, **STRATEGIES["layer_skip"], synced_gpus=True)
        with pytest.raises(ValueError, match="generate_batch.*leave assistant"):
            config = GenerationConfig(**GREEDY, **spec)
            model.generate_batch(prompt().tolist(), generation_config=config)
        with pytest.raises(ValueError, match="generate_batch.*leave assistant"):
            model.generate_batch(prompt().tolist(), **spec)
    # On one rank it is a flag like any other.
    check_same(model, {**spec, "synced_gpus": False}, prompt(), **GREEDY)


def test_typo_in_a_keyword(tiny: Tiny) -> None:
    """Stock Transformers' own error, with the strategy's keywords known and others not."""
    model = tiny()
    for kwargs in ({"asistant_strategy": "prompt_lookup"}, {"assistant_kwarg": {}}):
        with no_forward(model), pytest.raises(ValueError, match="model_kwargs.*not used"):
            model.generate(prompt(), **GREEDY, **kwargs)


def test_config_is_checked_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="assistant_strategy='oracle': choose"):
        hf_spec.SpecConfig("oracle")
    with pytest.raises(ValueError, match="without assistant_strategy"):
        hf_spec.SpecConfig(assistant_kwargs={"max_depth": 3})


def test_right_padding(tiny: Tiny, spec: Spec) -> None:
    model = tiny()
    batch = {key: value.flip(-1) for key, value in ragged().items()}
    with no_forward(model), pytest.raises(ValueError, match=r"padding in rows \[1, 2\].*left"):
        model.generate(**batch, **GREEDY, **spec)


@pytest.mark.parametrize("shape", [(1, 0), (0, 5)])
def test_no_token_to_continue(tiny: Tiny, spec: Spec, shape: tuple[int, int]) -> None:
    ids = torch.zeros(shape, dtype=torch.long)
    message = rf"input_ids of shape \({shape[0]}, {shape[1]}\): there is no token.*bos_token"
    with no_forward(tiny()), pytest.raises(ValueError, match=message):
        tiny().generate(ids, **GREEDY, **spec, attention_mask=torch.ones_like(ids))


def test_inputs_with_a_value_per_token(tiny: Tiny, spec: Spec) -> None:
    """Which the model does not cut to the token that a step runs."""
    model, values = tiny(), torch.ones_like(prompt())
    with no_forward(model), pytest.raises(ValueError, match="'num_items_in_batch' has one value"):
        model.generate(prompt(), num_items_in_batch=values, **GREEDY, **spec)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("openai-gpt", f"OpenAIGPTLMHeadModel.forward takes no {CACHE} by name.*Generate without"),
        ("mpt", "MptForCausalLM.forward takes no position_ids.*Generate without"),
        ("bart", "BartForCausalLM.forward takes no position_ids.*Generate without"),
        ("gpt_neo", "GPTNeoForCausalLM: its local attention counts slots.*Generate without"),
        ("cpmant", "CpmAntForCausalLM.forward takes no position_ids.*Generate without"),
        ("qwen4_exp_text", "Qwen4ExpForCausalLM: .* keeps positions of its own.*Generate without"),
        ("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM has a cache layer of type.*Generate with"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM keeps a recurrent state.*Generate without"),
        ("rwkv", "RwkvForCausalLM keeps a recurrent state.*Generate without"),
        ("inkling2_text", "Inkling2DynamicShortConvolution updates a recurrent state.*Generate w"),
        ("deepseek_v4", "DeepseekV4ForCausalLM keeps a recurrent state.*Generate without"),
    ],
)  # fmt: skip
def test_models(model_type: str, message: str) -> None:
    """Those that cannot forget what was rejected, and other forwards and caches."""
    model = build(model_type)
    with no_forward(model), pytest.raises(ValueError, match=message):
        model.generate(prompt(), **GREEDY, **STRATEGIES["prompt_lookup"])


def test_a_falcon_with_alibi(fresh: Tiny) -> None:
    model = fresh("falcon")
    model.config.alibi = True
    with no_forward(model), pytest.raises(ValueError, match="its ALiBi counts slots.*Generate wit"):
        model.generate(prompt(), **GREEDY, **STRATEGIES["prompt_lookup"])


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("jamba", r"layers \[0, .* of JambaForCausalLM have no KV.*prompt_depth='none' for BITA"),
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
    model.add_adapter(hf_spec.BitaConfig(prompt_depth="none"), "fits")
    check_same(model, drafting("bita"), prompt(), **GREEDY)
    model.delete_adapter("fits")


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


@pytest.mark.parametrize("by_default", [False, True])
def test_x_lora(fresh: Tiny, tmp_path: Path, spec: Spec, by_default: bool) -> None:
    """PEFT sets use_cache to False, whatever is given."""
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(fresh(), lora).save_pretrained(tmp_path)
    model: Any = fresh()
    model.config.use_cache = False
    if by_default:
        model.generation_config.use_cache = False
    config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters={"0": str(tmp_path)})
    mixed = get_peft_model(model, config).eval()
    with no_forward(model), pytest.raises(ValueError, match="X-LoRA runs without it.*one of its"):
        mixed.generate(input_ids=prompt(), **GREEDY, **spec, use_cache=True)


def test_a_refused_call_leaves_the_model_as_it_was(tiny: Tiny, spec: Spec) -> None:
    """Also when it fails half way: patches are undone, the next call works."""
    model = tiny("gpt2")
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
