"""Train the demo model: a small Llama on the modeling code of the installed Transformers.

Run ``python benchmarks/train_demo_model.py OUTPUT_DIR`` where hf_spec is installed. What decides
the result is a constant below or in ``demo_data.py``; the script writes the weights, the
tokenizer, ``training.json`` (data hash, seed, versions, final losses) and ``loss.png`` to
OUTPUT_DIR. Models in ``HELD_OUT`` are never seen. The weights that are shipped went through
``round_weights.py``.
"""

from __future__ import annotations

import hashlib
import math
import sys
from pathlib import Path

import torch
from demo_data import HELD_OUT, modeling_files, read_source
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_spec.files import write_json
from hf_spec.tools.bench.environment import machine
from hf_spec.tools.training.trainer import RATE, WithMuon, layer_matrices

SEED = 20261121
VOCAB_SIZE = 4096
SEQ_LENGTH = 1024
BATCH_SIZE = 4
#: Warm-up, then a cosine that would reach zero at COSINE_STEPS, left at COOL_DOWN_FROM for a linear
#: way to zero at STEPS.
WARMUP_STEPS, COSINE_STEPS, COOL_DOWN_FROM, STEPS = 60, 2200, 1000, 1600
#: Of Muon, which trains the matrices; embeddings and norms are trained by AdamW.
LEARNING_RATE = 4e-3
ADAMW_LEARNING_RATE = 3e-3
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"


def data_hash(texts: list[str]) -> str:
    """SHA-256 over all texts in order, so that two runs can tell whether they saw the same data."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8") + b"\0")
    return digest.hexdigest()


def train_tokenizer(texts: list[str]):
    """A byte-level BPE tokenizer of ``VOCAB_SIZE`` entries, as a Transformers fast tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD,
        model_max_length=SEQ_LENGTH, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def token_stream(tokenizer, texts: list[str]):
    """All texts as one 1-D tensor of ids: BOS, text, EOS, BOS, text, ..."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, verbose=False)["input_ids"] + [tokenizer.eos_token_id]
    return torch.tensor(ids)


class Windows:
    """Map-style dataset of windows of ``width`` tokens; offsets change with the epoch."""

    def __init__(self, stream, length: int, random_offsets: bool, width: int = SEQ_LENGTH):
        self.stream, self.width = stream, width
        last = len(stream) - width
        if random_offsets:
            generator = torch.Generator().manual_seed(SEED)
            # Whole passes over the stream, each from its own offset, in shuffled order.
            starts: list[torch.Tensor] = []
            while sum(len(part) for part in starts) < length:
                first = int(torch.randint(width, (1,), generator=generator))
                grid = torch.arange(first, last + 1, width)
                starts.append(grid[torch.randperm(len(grid), generator=generator)])
            self.starts = torch.cat(starts)[:length]
        else:
            self.starts = torch.arange(0, last + 1, width)[:length]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict:
        start = int(self.starts[index])
        window = self.stream[start : start + self.width]
        return {"input_ids": window, "labels": window.clone()}


def make_optimizer(
    model, learning_rate: float = LEARNING_RATE, adamw_learning_rate: float = ADAMW_LEARNING_RATE
):
    """Muon for the layers' matrices, AdamW for all others that need gradients.

    On the demo's corpus Muon reaches AdamW's loss in about half the steps.
    """
    matrices, parts = layer_matrices(model), ([], [])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parts[parameter in matrices].append(parameter)
    others, own = parts
    groups = [
        {"params": own, "lr": learning_rate / RATE, "weight_decay": 0.1},
        {"params": others, "lr": adamw_learning_rate, "weight_decay": 0.0},
    ]
    return WithMuon(torch.optim.AdamW(groups, betas=(0.9, 0.95)), matrices)


def learning_rate_factor(step: int) -> float:
    """Share of the peak learning rate at this step."""
    if step < WARMUP_STEPS:
        return step / WARMUP_STEPS
    at = min(step, COOL_DOWN_FROM)
    passed = (at - WARMUP_STEPS) / (COSINE_STEPS - WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * passed))
    left = (STEPS - step) / (STEPS - COOL_DOWN_FROM)
    return cosine * min(max(left, 0.0), 1.0)


def plot_losses(history: list[dict], path: Path) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    train = [(row["step"], row["loss"]) for row in history if "loss" in row]
    held = [(row["step"], row["eval_loss"]) for row in history if "eval_loss" in row]
    for rows, label, style in ((train, "training files", "-"), (held, "held-out files", "o-")):
        axes.plot([row[0] for row in rows], [row[1] for row in rows], style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="Demo model")
    axes.set_ylim(0, 4)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def trained(
    model, optimizer, factor, datasets: tuple[Windows, Windows], folder: Path, kind=Trainer, **more
):
    """The Trainer of a model after its steps, which go on from the last checkpoint in a folder.

    Args:
        factor: share of the peak learning rate by step.
        datasets: to train on, and held out.
        kind: makes the Trainer.
        more: arguments of the training.
    """
    arguments = TrainingArguments(
        output_dir=str(folder), max_grad_norm=1.0, use_cpu=not torch.cuda.is_available(),
        save_total_limit=1, report_to=[], train_sampling_strategy="sequential",
        per_device_eval_batch_size=more["per_device_train_batch_size"], **more,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    trainer = kind(
        model=model, args=arguments, train_dataset=datasets[0], eval_dataset=datasets[1],
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.is_dir() else None)
    return trainer


def save(target: Path, model, tokenizer, texts: list[str], stream, seen: int, **facts) -> None:
    """Write the weights, the tokenizer, and ``training.json`` with facts."""
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    record = {
        **machine(model.device), "parameters": model.num_parameters(),
        "training_tokens_in_files": len(stream), "training_tokens_seen": seen,
        "data_sha256": data_hash(texts), **facts,
    }  # fmt: skip
    write_json(target / "training.json", record)


def main(output: str) -> None:
    set_seed(SEED)
    target = Path(output)
    target.mkdir(parents=True, exist_ok=True)
    texts = [read_source(path) for path in modeling_files()]
    held_texts = [read_source(path) for path in modeling_files(held_out=True)]
    tokenizer = train_tokenizer(texts)
    stream, held_stream = token_stream(tokenizer, texts), token_stream(tokenizer, held_texts)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=12,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQ_LENGTH,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    datasets = Windows(stream, STEPS * BATCH_SIZE, True), Windows(held_stream, 10**9, False)
    trainer = trained(
        model, make_optimizer(model), learning_rate_factor, datasets, target / "checkpoints",
        max_steps=STEPS, seed=SEED, per_device_train_batch_size=BATCH_SIZE, bf16=True,
        torch_compile=True, logging_steps=20, eval_strategy="steps", eval_steps=200,
        save_strategy="steps", save_steps=200, dataloader_drop_last=True,
    )  # fmt: skip
    kinds = ("loss", "eval_loss")
    history = [row for row in trainer.state.log_history if row.keys() & {*kinds}]
    final, held_out = ([row[kind] for row in history if kind in row][-1] for kind in kinds)
    plot_losses(history, target / "loss.png")
    save(
        target, model, tokenizer, texts, stream, STEPS * BATCH_SIZE * SEQ_LENGTH, seed=SEED,
        files=len(texts), held_out_sha256=data_hash(held_texts), held_out_models=list(HELD_OUT),
        final_loss=final, held_out_loss=held_out,
        history=[{key: row[key] for key in ("step", *kinds) if key in row} for row in history],
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
