"""Every causal language model that the installed Transformers knows, built tiny from its config.

A field that is not named here keeps its default; ``OVERRIDES`` holds what single types need.
"""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.generation_mode import NEWEST_TESTED

#: Of the models; prompts have the tests' smaller one. The last three stand for images and such.
VOCAB = 64
LAYERS = 4
PLACEHOLDERS = {"image_token_id": 61, "video_token_id": 62, "audio_token_id": 63}


def _same(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


#: Taken by every config that has the field.
FIELDS: dict[str, Any] = {
    **_same(VOCAB, "vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"),
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    **_same(32, "hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"),
    **_same(48, "intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "dff", "dim_ff"),
    **_same(16, "moe_intermediate_size", "shared_expert_intermediate_size",
            "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size",
            "dense_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"),
    **_same(LAYERS, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    **_same(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
            "linear_num_value_heads", "linear_num_heads"),
    # So many that no two scores are 0: which of equal keys plain generation takes is open.
    "index_n_heads": 16,
    **_same(2, "num_key_value_heads", "num_kv_heads", "linear_num_key_heads"),
    **_same(8, "head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim",
            "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim",
            "hidden_size_per_layer_input", "laurel_rank"),
    **_same(16, "q_lora_rank", "kv_lora_rank", "o_lora_rank"),
    **_same(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    **_same(2, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    **_same(1, "n_group", "topk_group", "num_expert_group", "n_shared_experts",
            "first_k_dense_replace", "num_dense_layers", "moe_num_shared_experts"),
    **_same(128, "max_position_embeddings", "n_positions", "max_seq_len"),
    **_same(5, "sliding_window", "sliding_window_size"),
    "rotary_dim": 4,
    "index_topk": 4, "index_block_size": 4, "index_topk_blocks": 2,  # short, so that they matter
    **PLACEHOLDERS,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}  # fmt: skip

#: Fields that say what each layer is: all kinds that a model's default has, in turns.
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")

_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_d_ssm": 64,
          "mamba_n_groups": 1}  # fmt: skip
_GEMMA4 = {"per_layer_config": {"01": {"head_dim": 16}, "03": {"head_dim": 16}}}
_DOTS3 = {
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "per_layer_config": None,
}
_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8,
            "indexer_budget": 4, "indexer_compress_ratio": 2, "hc_lowrank": 8}  # fmt: skip

#: Short chunks.
_LLAMA4 = {
    "attention_chunk_size": 5, "no_rope_layers": [1, 0] * 2,
    "layer_types": ["chunked_attention", "full_attention"] * 2,
}  # fmt: skip
_INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": _MAMBA,
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "cpmant": {"dim_head": 8, "prompt_types": 4, "prompt_length": 4, "segment_types": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots3_note_text": _DOTS3,
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 5},
    "inkling_text": _INKLING,
    "inkling2_text": _INKLING,
    "inkling2_loop_text": _INKLING,
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
        "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 2, "n_recurrent_loops": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 4,
    },
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 4, "n_groups": 1},
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {"text_config": _INDEXER},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "xlnet": {"d_inner": 48, "mem_len": 16},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # heads' sizes are rounded up
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


#: Why these are not built.
EXCLUDED = {
    "blt": "plain generate fails: its config does not tell its number of layers",
    "dots3_note": "audio and vision towers; its text part is dots3_note_text",
    "gemma3n": "its vision tower needs timm",
    "gemma4_assistant": "drafts for a Gemma 4 from its hidden states; no language model by itself",
    "gemma4_unified_assistant": "drafts for a Gemma 4 from its hidden states",
    "musicgen": "its causal language model is built from a part of its config",
    "musicgen_melody": "its causal language model is built from a part of its config",
}

_NO_MLP = "layer_skip"  # no module of that name in bert's layers, nor in all of Mamba's
_TRANSFORM = "bita medusa ppd propd space"  # behind the decoder: heads and probes would be misread
_NO_LAYERS = "layer_skip propd space"  # not in one list, or with attention of another name
_KEYS = "bita"  # keys and values of several shapes, or not in every layer
_READS = "dflash dspark eagle3"  # states of several layers, or of embeddings of another size
_ALL = " ".join(methods())

#: Strategies that are refused, in transformers 5.24.
REFUSED: dict[str, str] = {
    # Recurrent states by code of their own, or outside the cache.
    **_same(_ALL, "deepseek_v4", "inkling2_loop_text", "inkling2_text", "minimax", "qwen4_exp",
            "qwen4_exp_text", "recurrent_gemma", "reformer", "rwkv", "xlnet", "xlstm", "zaya"),
    # Positions that are counted in slots of the cache.
    **_same(_ALL, "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "bloom", "gpt_neo",
            "inkling_text", "marian", "mbart", "moss_transcribe_diarize", "mpt", "mvp", "pegasus",
            "plbart", "roformer", "trocr", "whisper"),
    # Blocks of slots in the cache; positions that are made in several places; no cache of keys; a
    # mask that is wrong where a batch is padded.
    **_same(_ALL, "minimax_m3_vl_text", "cpmant", "prophetnet", "openai-gpt", "xlm", "git"),
    **_same(f"{_NO_MLP} {_TRANSFORM}", "bert", "big_bird", "camembert", "data2vec-text", "electra",
            "ernie", "megatron-bert", "roberta",
            "roberta-prelayernorm", "roc_bert", "xlm-roberta",
            "xlm-roberta-xl", "xmod"),
    "rembert": f"{_NO_MLP} {_TRANSFORM} dflash dspark",
    "modernbert-decoder": f"{_NO_MLP} {_TRANSFORM} {_READS}",
    "bert-generation": _NO_MLP,
    **_same(f"{_NO_LAYERS} {_READS}", "ctrl", "dbrx", "hrm_text", "phi4_multimodal"),
    "longcat_flash": f"{_KEYS} mtp",  # layers with lists of norms
    **_same(f"{_NO_MLP} {_KEYS}", "falcon_mamba", "mamba", "mamba2", "nemotron_h", "zamba",
            "zamba2"),
    **_same(_KEYS, "axk1", "axk2", "bailing_hybrid", "bamba", "deepseek_v2", "deepseek_v3",
            "deepseek_v32", "dots3_note_text", "gemma4", "gemma4_text", "gemma4_unified",
            "gemma4_unified_text", "glm4_moe_lite", "granitemoehybrid", "jamba", "kimi_linear",
            "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mimo_v2_flash", "minicpm3",
            "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
            "qwen3_next", "sarvam_mla", "youtu"),
    # Layers that share keys, and several streams of states.
    **_same(f"{_KEYS} layer_skip propd {_READS}", "gemma3n_text", "hy_v4"),
    "glm_moe_dsa": f"{_KEYS} layer_skip",  # attention that returns more
    **_same("layer_skip", "gpt_neox_japanese", "jetmoe", "llama4", "llama4_text"),  # likewise
    "mllama": f"{_KEYS} propd",  # layers that wait for an image
}  # fmt: skip

#: ``mtp`` has no use for their decoder layers, which have norms elsewhere, are not given rotations,
#: or wait for more.
NO_MTP = """
apertus apertus1p5_text axk2 bailing_hybrid bamba beam bert bert-generation big_bird
biogpt camembert codegen ctrl data2vec-text
dbrx dory dots3_note_text electra ernie exaone4 falcon falcon_h1 falcon_mamba flex_olmo
gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text gpt-sw3 gpt2 gpt_bigcode
gpt_neox gpt_neox_japanese gptj granitemoehybrid hrm_text hy_v4 jamba kimi_linear lfm2
lfm2_moe lfm3 mamba mamba2 megatron-bert mllama modernbert-decoder moshi
nanochat olmo olmo2 olmo3 olmo_hybrid opt phi4_multimodal rembert roberta
roberta-prelayernorm roc_bert xglm xlm-roberta xlm-roberta-xl xmod zamba
zamba2
"""
for _kind in NO_MTP.split():
    REFUSED[_kind] = f"{REFUSED.get(_kind, '')} mtp".strip()

#: Of these, only where a batch is padded: plain generation then masks the wrong tokens.
PADDED = ("git",)


def model_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_class(model_type: str) -> Any:
    """The config class of a type; the test is skipped if Transformers is too old to have it."""
    newest = Version(NEWEST_TESTED["transformers"])
    if model_type not in CONFIG_MAPPING and Version(transformers.__version__) < newest:
        pytest.skip(f"Transformers {transformers.__version__} has no {model_type}")
    return CONFIG_MAPPING[model_type]


def tiny_config(model_type: str) -> Any:
    return tiny_of(config_class(model_type), OVERRIDES.get(model_type, {}))


def tiny_of(kind: Any, given: dict[str, Any], sizes: dict[str, Any] = FIELDS) -> Any:
    """A config of a class.

    Args:
        given: fields of this class alone; those of a part in a dictionary.
        sizes: fields of every class that has them.
    """
    preset = kind()
    default = preset.to_dict()
    known = {*default, *getattr(kind, "attribute_map", {})}
    fields = {name: value for name, value in sizes.items() if name in known}
    for name in ("sliding_window", "sliding_window_size"):
        if default.get(name, ...) is None:
            fields.pop(name, None)
    for name in PER_LAYER:
        if default.get(name):
            kinds = list(dict.fromkeys(default[name]))
            fields[name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
    if "kv_lora_rank" in known:  # latent attention: every head has keys of its own
        fields["num_key_value_heads"] = FIELDS["num_attention_heads"]
    subs = getattr(kind, "sub_configs", {})
    for name in subs:
        part = getattr(preset, name, None)
        if part is not None:
            fields[name] = tiny_of(type(part), given.get(name, {}), sizes).to_dict()
        elif name in given:  # a part that is left out by default
            fields[name] = given[name]
    fields.update({name: value for name, value in given.items() if name not in subs})
    return kind(**fields)


@cache
def build(model_type: str) -> PreTrainedModel:
    """A random model whose outputs wander; tests must leave it as they found it."""
    return random_model(tiny_config(model_type))


def random_model(config: Any) -> PreTrainedModel:
    """As :func:`build` makes it."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise_all(model)
    if hasattr(model.config, "image_token_id"):  # text models never say these
        model.generation_config.suppress_tokens = list(PLACEHOLDERS.values())
    return model


def randomise_all(model: Any) -> None:
    """Give all parameters values with which outputs wander, and outputs their full length."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # Biases and norms start at 0 and 1: make them matter, too.
        parameter.data = 0.2 * noise if parameter.ndim > 1 else parameter.data + 0.1 * noise
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.eval()


@cache
def base_of(name: str) -> PreTrainedModel:
    """A Gemma 4 of a type; ``shared``: whose last layers read the keys of those before."""
    if name != "shared":
        return build(name)
    given = {**OVERRIDES["gemma4_text"], "num_kv_shared_layers": 2}
    return random_model(tiny_of(config_class("gemma4_text"), given))


@cache
def assistant_for(name: str, ordered: bool = False, **fields: Any) -> PreTrainedModel:
    """A random assistant for :func:`base_of`, of three layers and narrower.

    Args:
        ordered: whether it has logits for clusters of likely tokens only.
        fields: of its text part.
    """
    text: Any = base_of(name).config.get_text_config(decoder=True)
    kind = config_class(f"gemma4{'_unified' * ('unified' in name)}_assistant")
    given = {
        **text.to_dict(), "hidden_size": 24, "num_hidden_layers": 3, "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "per_layer_config": {"02": {"head_dim": 16}}, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "enable_moe_block": False, **fields,
    }  # fmt: skip
    return random_model(
        kind(
            text_config=type(text)(**given), backbone_hidden_size=text.hidden_size,
            use_ordered_embeddings=ordered, num_centroids=16, centroid_intermediate_top_k=5,
        )
    )  # fmt: skip
