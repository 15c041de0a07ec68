"""What a strategy cannot do is refused by name, with a remedy, before the model runs."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from conftest import STRATEGIES, Tiny, check_same, prompt, ragged, shared
from peft import LilyConfig, LoraConfig, PromptTuningConfig, XLoraConfig, get_peft_model
from running import drafting, no_forward
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput

import hf_spec
from hf_spec.modeling_patches import generation_mode
from hf_spec.modeling_patches.modules import CACHE

Spec = dict[str, Any]

GREEDY = {"max_new_tokens": 8, "do_sample": False}


def keeps(**options: Any) -> GenerationConfig:
    """A configuration with options that its release may not know."""
    config = GenerationConfig()
    vars(config).update(options)
    return config


def empty(*shape: int) -> Spec:
    return {"input_ids": torch.zeros(shape).long(), "attention_mask": torch.ones(shape).long()}


#: Beside those of test_every_option.py and tests/methods/test_options.py.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'.*Leave it out"),
    ({"cache_implementation": "paged"}, "'paged'"),
    ({"cache_implementation": "static", "compile_config": CompileConfig(backend="inducto")},
     r"backend of the CompileConfig='inducto' \(did you mean 'inductor'\?\): choose one of"),
    ({"use_cache": False}, "use_cache=False.*Set use_cache=True; in TRL.*generation_kwargs="),
    ({"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)},
     "watermarking_config='SynthID"),
    ({"assistant_strategy": "layer_skip", "assistant_kwargs": {}}, "skip_attention.*hf-spec sea"),
    ({"assistant_kwargs": {"tree_width": 3}}, "assistant_kwargs.*no option 'tree_width'; its opt"),
    ({"assistant_kwargs": [1]}, "assistant_kwargs is a list: give a dict"),
    ({"assistant_strategy": "promptlookup"}, r"did you mean 'prompt_lookup'\?\): choose"),
    ({"assistant_strategy": "autom"}, r"did you mean 'auto'\?\): choose one of .*, auto\."),
    ({"assistant_strategy": ["ppd"]}, r"assistant_strategy=\['ppd'\]: choose one of"),
    ({"assistant_strategy": "oracle"},
     "assistant_strategy='oracle': choose one of .*layer_skip.*prompt_lookup"),
    ({"assistant_model": shared("llama_tied")}, "assistant_model.*Leave one"),
    ({**STRATEGIES["layer_skip"], "synced_gpus": True}, "synced_gpus=True.*drafts run none"),
    ({"assistant_strategy": None, "asistant_strategy": "plain"},
     r"no argument 'asistant_strategy' \(did you mean 'assistant_strategy'\?\)"),
    ({"assistant_kwarg": {}}, r"no argument 'assistant_kwarg' \(did you mean 'assistant_kwargs'"),
    # Stock Transformers' own error.
    ({"strategy": "plain"}, "model_kwargs.*not used"),
    # What is no cache.
    ({CACHE: "x"}, "the given cache is of type str. Give a DynamicCache"),
    ({CACHE: GenerateDecoderOnlyOutput(prompt(), **{CACHE: DynamicCache()})},
     f"of type GenerateDecoderOnlyOutput. Give the cache of this output, {CACHE}=output.{CACHE}"),
    # Modes that not every release has.
    ({"generation_config": keeps(use_mtp=True)}, "use_mtp=True.*assistant_strategy='mtp'"),
    ({"generation_config": keeps(speculation_type="dflash")},
     "speculation_type='dflash'.*the strategy alone"),
    ({"generation_config": keeps(low_memory=True)}, "low_memory=True.*Leave one"),
    ({"generation_config": keeps(prompt_lookup_num_tokens=5)},
     "prompt_lookup_num_tokens=5.*assistant_strategy='prompt_lookup'"),
    ({"generation_config": keeps(max_matching_ngram_size=2)},
     "max_matching_ngram_size=2.*assistant_kwargs={'max_ngram'"),
    ({name: value.flip(-1) for name, value in ragged().items()},
     r"padding in rows \[1, 2\].*left"),
    (empty(1, 0), r"input_ids of shape \(1, 0\): there is no token.*bos_token"),
    ({"input_ids": prompt().float()}, "input_ids of dtype torch.float32: tokens are integers"),
    (empty(0, 5), r"input_ids of shape \(0, 5\): there is no token.*bos_token"),
    # Which the model does not cut to the token that a step runs.
    ({"num_items_in_batch": torch.ones_like(prompt())}, "'num_items_in_batch' has one value"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[words for _, words in REFUSED])
def test_calls(tiny: Tiny, spec: Spec, given: Spec, message: str) -> None:
    with no_forward(tiny()), pytest.raises(ValueError, match=message):
        tiny().generate(**{"input_ids": prompt(), **GREEDY, **spec, **given})


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
    model.config.use_cache = model.generation_config.use_cache = False
    check_same(model, spec, prompt(), **GREEDY)
    assert model.generation_config.use_cache is False


def test_synced_gpus_on_one_rank(tiny: Tiny) -> None:
    """A flag like any other."""
    check_same(tiny(), {**STRATEGIES["prompt_lookup"], "synced_gpus": False}, prompt(), **GREEDY)


def test_config_is_checked_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="assistant_strategy='oracle': choose"):
        hf_spec.SpecConfig("oracle")
    with pytest.raises(ValueError, match="without assistant_strategy"):
        hf_spec.SpecConfig(assistant_kwargs={"max_depth": 3})


def alibi(fresh: Tiny, folder: Path) -> Any:
    model = fresh("falcon")
    model.config.alibi = True
    return model


def encoder_decoder(fresh: Tiny, folder: Path) -> Any:
    config = AutoConfig.for_model(
        "t5", vocab_size=61, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return AutoModelForSeq2SeqLM.from_config(config).eval()


def prompt_learning(fresh: Tiny, folder: Path) -> Any:
    return get_peft_model(fresh(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def x_lora(fresh: Tiny, folder: Path, by_default: bool = False) -> Any:
    """PEFT sets use_cache to False, whatever is given."""
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(fresh(), lora).save_pretrained(folder)
    model: Any = fresh()
    model.config.use_cache = False
    if by_default:
        model.generation_config.use_cache = False
    config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters={"0": str(folder)})
    return get_peft_model(model, config).eval()


#: Those that cannot forget what was rejected, and other forwards and caches.
MODELS: list[tuple[Any, str]] = [
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
    (alibi, "its ALiBi counts slots.*Generate wit"),
    (encoder_decoder, "encoder-decoder.*Generate without"),
    (prompt_learning, "PROMPT_TUNING.*Disable the adapter"),
    (x_lora, "X-LoRA runs without it.*one of its"),
    (partial(x_lora, by_default=True), "X-LoRA runs without it.*one of its"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message"), MODELS)
def test_models(fresh: Tiny, tmp_path: Path, spec: Spec, kind: Any, message: str) -> None:
    model = build(kind) if isinstance(kind, str) else kind(fresh, tmp_path)
    with no_forward(model), pytest.raises(ValueError, match=message):
        model.generate(input_ids=prompt(), **GREEDY, **spec, use_cache=True)


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


def test_an_encoder_is_called_so():
    """A BERT that is no decoder generates, with each token seeing those behind it."""
    fields = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 61}
    config = AutoConfig.for_model("bert", num_hidden_layers=1, num_attention_heads=4, **fields)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="is an encoder .is_decoder=False in its config"):
        model.generate(prompt(), **GREEDY, **STRATEGIES["prompt_lookup"])


def test_an_adapter_that_averages_over_a_forward(fresh):
    """PEFT's Lily, unless it is disabled."""
    model = get_peft_model(fresh(), LilyConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    spec = {**GREEDY, **STRATEGIES["prompt_lookup"]}
    with pytest.raises(ValueError, match=r"peft_type='LILY'.*Lily \(default\) weights .* a mean"):
        model.generate(input_ids=prompt(), **spec)
    with model.disable_adapter():
        assert model.generate(input_ids=prompt(), **spec).shape[1] == prompt().shape[1] + 8
