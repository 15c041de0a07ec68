"""Tiny random models of every architecture with recurrent layers that trees run through."""

from functools import cache
from typing import Any

import torch
from architectures import config_class
from conftest import VOCAB, _shared
from transformers import AutoModelForCausalLM, PreTrainedModel

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
_LINEAR = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_DELTA: dict[str, Any] = {
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "layer_types": _LINEAR,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
_QWEN_EXPERTS = {
    **_EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
_KDA: dict[str, Any] = {
    **_EXPERTS, "layer_types": _LINEAR, "linear_num_heads": 4, "linear_head_dim": 8,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "head_dim": 8, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1,
}  # fmt: skip
_MAMBA1 = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip

#: model type -> fields of its config.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_QWEN_EXPERTS},
    "qwen3_next": {**_DELTA, **_QWEN_EXPERTS},
    "olmo_hybrid": {**_DELTA, "linear_allow_neg_eigval": True},
    "kimi_linear": {
        **_KDA, "q_lora_rank": None, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "bailing_hybrid": {
        **_KDA, "q_lora_rank": 16, "num_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA2, "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
    },
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "head_dim": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8,
        "conv_kernel": 4, "chunk_size": 16,
    },
    "zamba2": {
        "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 2,
        "n_mamba_heads": 4, "mamba_headdim": 16, "num_mem_blocks": 1, "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "use_mem_rope": True,
        "num_key_value_heads": 4, "adapter_rank": 8,
    },
    "mamba2": {
        "num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "expand": 2,
        "chunk_size": 16,
    },
    "jamba": {
        **_MAMBA1, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
    },
    "zamba": {
        **_MAMBA1, "n_mamba_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_key_value_heads": 4,
    },
    "mamba": {"state_size": 8, "expand": 2},
    "falcon_mamba": {"state_size": 8, "expand": 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 16},
    "lfm3": {
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "sliding_window": 16, "block_multiple_of": 16,
    },
    "lfm2_moe": {
        **_EXPERTS, "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
}  # fmt: skip

#: One for each rule; layers with keys and states both; none with keys; windows.
KINDS = ("qwen3_5_text", "kimi_linear", "falcon_h1", "jamba", "mamba", "lfm3")


def recurrent(kind: str, **fields: Any) -> PreTrainedModel:
    """A model that the test may change, with other fields of its config if some are given.

    Weights are large, and decays from almost none to almost all within a token, so that states and
    the way to a token matter.
    """
    torch.manual_seed(0)
    config = config_class(kind)(**{**_COMMON, **CONFIGS[kind], **fields})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            convolves = "conv" in name and parameter.ndim == 3
            if name.endswith(("dt_bias", "dt_proj.bias", "dt_proj_bias")):
                parameter.normal_(0, 1)
            elif name.endswith("A_log"):
                parameter.uniform_(-4, 1.5)
            elif name.endswith(".D"):  # the way around the state
                parameter.fill_(0.1)
            elif convolves:
                parameter.normal_(0, 0.5)
            elif name.endswith(("x_proj_weight", "dt_proj_weight")):  # Zamba
                parameter.normal_(0, 0.15)
            elif parameter.ndim >= 2:
                parameter.mul_(4)
    model.generation_config.pad_token_id = 0
    return model


@cache
def shared_recurrent(kind: str) -> PreTrainedModel:
    """The same, not to be changed."""
    model = recurrent(kind)
    _shared.append(model)
    return model
