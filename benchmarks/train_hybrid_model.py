"""Train a small hybrid language model of Qwen3.5's shape, out of a small Llama chat model.

Every fourth layer has full attention, the others linear attention by the gated delta rule.
Embeddings, MLPs and norms are the Llama's and stay as they are; the mixers of all layers start from
its attention and learn to give its hidden states and logits. That takes a small part of the tokens
of a training from scratch, in which PyTorch's gated delta rule on a CPU is slow::

    python benchmarks/train_hybrid_model.py LLAMA OUTPUT_DIR DATA [DATA ...] [--steps N]

``LLAMA`` is a folder with a Llama and a tokenizer that has a chat template. ``DATA`` are files of
JSON lines or parquet with ``question`` or ``prompt``, and ``answer`` or ``completion``. An
interrupted run resumes from its last checkpoint, also with another number of steps. The script
writes the weights, the tokenizer and ``training.json`` to OUTPUT_DIR.
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from train_demo_model import Windows, make_optimizer, save, trained
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Trainer,
    set_seed,
)

from hf_spec.tools.data import Row, read

SEED = 20261125
SEQ_LENGTH = 512
BATCH_SIZE = 2
WARMUP_STEPS, STEPS = 10, 300
#: Of Muon, which trains the matrices, and of AdamW, which trains decays and convolutions.
LEARNING_RATE, ADAMW_LEARNING_RATE = 2e-3, 5e-3
SAVE_EVERY, LOG_EVERY = 25, 5
#: Windows at the end of the data that are not trained on.
HELD_OUT = 16


def conversation(row: Row) -> list[dict[str, str]]:
    user = row.fields.get("question", row.fields.get("prompt"))
    assistant = row.fields.get("answer", row.fields.get("completion"))
    if not isinstance(user, str) or not isinstance(assistant, str):
        raise ValueError("a row has a question or prompt, and an answer or completion, as text")
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def conversations(paths: list[str]) -> list[list[dict[str, str]]]:
    """A prompt and its answer for each row of ``paths``, as chat messages, in shuffled order."""
    found = [messages for path in paths for messages in read(path, conversation)]
    random.Random(SEED).shuffle(found)
    return found


def token_stream(tokenizer, texts: list[str]):
    """All conversations that fit into a window, one after the other, as one 1-D tensor of ids."""
    ids: list[int] = []
    for text in texts:
        encoded = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(encoded) <= SEQ_LENGTH:
            ids += encoded
    return torch.tensor(ids)


def hybrid_config(llama):
    """Qwen3.5's configuration with the sizes of a Llama's.

    Heads of linear attention are as many and as large as the Llama's query heads, and rotary
    embeddings turn whole heads, so that its projections fit.
    """
    heads, size = llama.num_attention_heads, llama.head_dim
    return Qwen3_5TextConfig(
        vocab_size=llama.vocab_size, hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size, num_hidden_layers=llama.num_hidden_layers,
        num_attention_heads=heads, num_key_value_heads=llama.num_key_value_heads, head_dim=size,
        linear_num_key_heads=heads, linear_num_value_heads=heads,
        linear_key_head_dim=size, linear_value_head_dim=size,
        rope_parameters={
            "rope_type": "default", "rope_theta": llama.rope_parameters["rope_theta"],
            "partial_rotary_factor": 1.0,
        },
        max_position_embeddings=llama.max_position_embeddings, rms_norm_eps=llama.rms_norm_eps,
        tie_word_embeddings=llama.tie_word_embeddings, bos_token_id=llama.bos_token_id,
        eos_token_id=llama.eos_token_id, pad_token_id=llama.pad_token_id,
    )  # fmt: skip


def convert(llama):
    """A hybrid model that starts from ``llama``'s weights; only its mixers need gradients."""
    config = hybrid_config(llama.config)
    hybrid = Qwen3_5ForCausalLM(config).requires_grad_(False)
    size = config.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads

    def norm(ours, theirs):  # Qwen3.5 multiplies by one more than the weight
        ours.weight.copy_(theirs.weight - 1)

    with torch.no_grad():
        hybrid.model.embed_tokens.load_state_dict(llama.model.embed_tokens.state_dict())
        hybrid.lm_head.load_state_dict(llama.lm_head.state_dict())
        norm(hybrid.model.norm, llama.model.norm)
        for ours, theirs in zip(hybrid.model.layers, llama.model.layers):
            ours.mlp.load_state_dict(theirs.mlp.state_dict())
            norm(ours.input_layernorm, theirs.input_layernorm)
            norm(ours.post_attention_layernorm, theirs.post_attention_layernorm)
            attention = theirs.self_attn
            query, key, value = (
                getattr(attention, f"{name}_proj").weight.unflatten(0, (-1, size)) for name in "qkv"
            )
            if hasattr(ours, "self_attn"):
                mixer = ours.self_attn
                gated = torch.stack([query, torch.zeros_like(query)], dim=1)
                mixer.q_proj.weight.copy_(gated.flatten(0, 2))
                mixer.k_proj.weight.copy_(key.flatten(0, 1))
                mixer.v_proj.weight.copy_(value.flatten(0, 1))
                mixer.o_proj.weight.copy_(2 * attention.o_proj.weight)  # a gate of 0 halves
            else:
                mixer = ours.linear_attn
                key, value = (part.repeat_interleave(groups, dim=0) for part in (key, value))
                mixer.in_proj_qkv.weight.copy_(torch.cat([query, key, value]).flatten(0, 1))
                mixer.out_proj.weight.copy_(attention.o_proj.weight)
                mixer.conv1d.weight.zero_()
                mixer.conv1d.weight[..., -1] = 1
                # The longest memory is some hundreds of tokens, the shortest one or two.
                mixer.A_log.copy_(torch.linspace(-6, -0.5, config.linear_num_value_heads))
            mixer.requires_grad_(True)
    return hybrid


def distillation_loss(hybrid, llama, input_ids):
    """How far the hybrid's outputs are from the Llama's, and its own loss on the text.

    Args:
        input_ids: ``(batch, tokens)``.

    Returns:
        Two scalars: the loss to train with, which is the KL divergence of the logits in nats plus
        the squared distance of the layers' hidden states relative to their size; and the
        cross-entropy on the text in nats per token.
    """
    with torch.no_grad():
        theirs = llama(input_ids=input_ids, use_cache=False, output_hidden_states=True)
    ours = hybrid(input_ids=input_ids, use_cache=False, output_hidden_states=True)
    log_probs = F.log_softmax(ours.logits.float(), dim=-1)
    target = F.log_softmax(theirs.logits.float(), dim=-1)
    divergence = (target.exp() * (target - log_probs)).sum(-1).mean()
    layers = list(zip(ours.hidden_states[1:], theirs.hidden_states[1:]))
    distance = sum((a - b).pow(2).mean() / b.pow(2).mean() for a, b in layers) / len(layers)
    text = F.nll_loss(log_probs[:, :-1].flatten(0, 1).detach(), input_ids[:, 1:].flatten())
    return divergence + distance, text


class Distillation(Trainer):
    """Trains a hybrid to give the outputs of ``llama``; logs its loss on the text, too."""

    def __init__(self, *args, llama, **kwargs):
        super().__init__(*args, **kwargs)
        self.llama, self.text_losses = llama, []

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, text = distillation_loss(model, self.llama, inputs["input_ids"])
        self.text_losses.append(text.item())
        return (loss, {}) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        for prefix in ("", "eval_"):
            if f"{prefix}loss" in logs:
                logs[f"{prefix}text_loss"] = sum(self.text_losses) / len(self.text_losses)
                self.text_losses.clear()
        super().log(logs, *args, **kwargs)


def train(hybrid, llama, stream, steps: int, folder: Path) -> list[dict]:
    """Train the mixers of ``hybrid`` and return the history of losses.

    Args:
        stream: 1-D tensor of token ids; the last ``HELD_OUT`` windows are for evaluation.
        folder: of checkpoints, from the last of which training goes on.
    """
    held = HELD_OUT * SEQ_LENGTH
    datasets = (
        Windows(stream[:-held], steps * BATCH_SIZE, True, SEQ_LENGTH),
        Windows(stream[-held:], HELD_OUT, False, SEQ_LENGTH),
    )
    trainer = trained(
        hybrid, make_optimizer(hybrid, LEARNING_RATE, ADAMW_LEARNING_RATE),
        lambda step: min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / steps), datasets, folder,
        partial(Distillation, llama=llama), max_steps=steps, seed=SEED,
        per_device_train_batch_size=BATCH_SIZE, logging_steps=LOG_EVERY, save_steps=SAVE_EVERY,
    )  # fmt: skip
    trainer.text_losses.clear()  # of steps since the last log
    found = trainer.evaluate()
    names = ("step", "loss", "text_loss")
    history = [{name: row[name] for name in names} for row in trainer.state.log_history
               if "loss" in row]  # fmt: skip
    last = {f"held_out_{name}": found[f"eval_{name}"] for name in ("loss", "text_loss")}
    return [*history, {"step": steps, **last}]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("llama", metavar="LLAMA")
    parser.add_argument("output", metavar="OUTPUT_DIR")
    parser.add_argument("data", metavar="DATA", nargs="+")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args(argv)

    set_seed(SEED)
    torch.set_flush_denormal(True)  # products of decays are often too small for normal numbers
    target = Path(arguments.output)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.llama)
    texts = [
        tokenizer.apply_chat_template(messages, tokenize=False)
        for messages in conversations(arguments.data)
    ]
    stream = token_stream(tokenizer, texts)
    llama = LlamaForCausalLM.from_pretrained(arguments.llama, dtype=torch.float32)
    hybrid = convert(llama)
    history = train(hybrid, llama, stream, arguments.steps, target / "checkpoints")
    seen = arguments.steps * BATCH_SIZE * SEQ_LENGTH
    save(target, hybrid, tokenizer, texts, stream, seen, seed=SEED, history=history)


if __name__ == "__main__":
    main()
