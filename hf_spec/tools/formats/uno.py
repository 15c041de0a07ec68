"""Writes a gated SPACE adapter for SGLang's UNO (``sglang/srt/speculative/uno_*.py``, 0.5.23).

UNO runs the last token through the model, followed by random tokens of the vocabulary, which run
with one LoRA. The predictions after these are verified in a second forward. This is a SPACE adapter
with ``masks="noise"``. The LoRA is a folder in PEFT's format. SGLang requires updates of v_proj
together with those of q_proj, and of up_proj together with those of gate_proj.
"""

from typing import Any

from hf_spec.adapters.active import ActiveAdapter
from hf_spec.adapters.predicting import MARKOV_HEAD, VOCABULARY

#: Linear modules that SGLang's LoRA knows in every model, each with the module that must be updated
#: together with it, if there is one.
NEEDS = {
    "q_proj": "v_proj", "k_proj": "q_proj", "v_proj": "q_proj", "qkv_proj": None, "o_proj": None,
    "gate_proj": None, "up_proj": "gate_proj", "gate_up_proj": None, "down_proj": None,
}  # fmt: skip


def uno(model: Any, adapter: ActiveAdapter) -> dict[str, Any]:
    """``adapter_config.json`` and the tensors of ``adapter_model.safetensors``.

    Raises:
        ValueError: the adapter has parameters that UNO does not support, or updates modules that
            SGLang does not know.
    """
    config: Any = adapter.config
    weights = adapter.weights()
    missing = {
        f"update={config.update!r}: UNO leaves tokens to the base model": config.update != "gated",
        "learned mask tokens: UNO puts random tokens of the vocabulary there": "masks" in weights,
        "a Markov head: UNO predicts each token without those before": MARKOV_HEAD[0] in weights,
        "a draft vocabulary: UNO predicts all tokens": VOCABULARY in weights,
    }
    if wrong := [reason for reason, there in missing.items() if there]:
        raise ValueError(
            f"SGLang's UNO has no place for what this adapter has: {'; '.join(wrong)}. Train one "
            "with --update gated --masks noise --markov-rank 0 --draft-vocab-size 0."
        )
    names = sorted(config.modules(model))
    for name in names:
        parent, _, own = name.rpartition(".")
        needed = NEEDS.get(own)
        if own not in NEEDS or (needed and f"{parent}.{needed}" not in names):
            rule = f"without {needed} beside it" if own in NEEDS else "by that name"
            raise ValueError(
                f"target_modules has {name!r}, which SGLang's LoRA does not load {rule}: train with"
                f" some of {', '.join(NEEDS)}; q_proj and v_proj, and up_proj with gate_proj, go "
                "together."
            )
    tensors = {}
    for name in names:
        down, up, _ = adapter.module.factors(name)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    description = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True,
        "base_model_name_or_path": config.base_model_name_or_path, "r": config.rank,
        "lora_alpha": config.alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": names,
    }  # fmt: skip
    return {"adapter_config.json": description, "adapter_model.safetensors": tensors}


WRITERS = {"sglang": uno}
