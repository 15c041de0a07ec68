"""A tiny random Llama with a byte-level tokenizer, as a checkpoint on disk."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

PAD, EOS, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONTEXT = 256


def make_tokenizer(chat: bool = True) -> Any:
    """One token per byte, and four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, USER, ASSISTANT, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[USER, ASSISTANT],
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        pad_token_id=0, bos_token_id=None, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def save_checkpoint(folder: Path, chat: bool = True, layers: int = 2) -> Path:
    make_model(layers=layers).save_pretrained(folder)
    make_tokenizer(chat).save_pretrained(folder)
    return folder


def load_checkpoint(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model


def plain_text(model: Any, tokenizer: Any, text: str, **options: Any) -> str:
    """What plain generation adds to a text, greedily unless the options say otherwise."""
    inputs = tokenizer(text, return_tensors="pt")
    ids = model.generate(**inputs, **{"do_sample": False, "tokenizer": tokenizer, **options})
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def write_prompts(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
