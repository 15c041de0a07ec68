"""Tau beside a policy that changes, with a drafter that stays or learns: ``python
benchmarks/follow_policy.py [--train-drafter]``.

A toy in place of reinforcement learning: the demo model is fine-tuned on Python's standard library,
a few texts per step, and samples answers to beginnings of other texts of it before each step, which
its ``medusa`` adapter drafts. Rollouts and policy are the same in both runs.

One thread, and all times are CPU seconds of the process, so that other work of the machine does not
count; the share that the drafter's training may take is of such seconds, too.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Trainer,
    TrainingArguments,
)

import hf_spec
from hf_spec.core.stats import PHASES, SpecStats
from hf_spec.integrations import OnlineTraining, TRLCallback

DEMO = Path(hf_spec.__file__).parent / "tools" / "demo"
#: Files of the library, tokens of a text and of a prompt, prompts, and answers of a step.
FILES, TEXT, PROMPT, PROMPTS, ANSWERS = 80, 96, 32, 200, 4


def texts() -> list[list[int]]:
    """Stretches of the standard library's modules, in random order."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO / "model")
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES]:
        ids = tokenizer(path.read_text(errors="ignore"))["input_ids"]
        found += [ids[at : at + TEXT] for at in range(0, len(ids) - TEXT, TEXT)]
    random.Random(0).shuffle(found)
    return found


class Toy(Trainer):
    """Generates before each step, as trainers of TRL do."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        first = ANSWERS * self.state.global_step
        rows = [self.prompts[(first + row) % PROMPTS] for row in range(ANSWERS)]
        ids = torch.tensor(rows)
        model.eval()
        begun = time.process_time()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=self.generation_config
        )
        between = time.process_time()
        stats: Any = hf_spec.last_stats(model)
        self.rollouts.merge(stats)
        model.train()
        loss = super().training_step(model, *args, **kwargs)
        self.seconds["rollouts"] += between - begun
        self.seconds["policy"] += time.process_time() - between
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train-drafter", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.05)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    config: Any = GenerationConfig(
        max_new_tokens=40, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=2
    )
    config.assistant_strategy = "medusa"
    config.assistant_kwargs = {"adapter": str(DEMO / "adapters" / "medusa"), "drafting": "always"}
    rows = texts()
    learned, begun = rows[:-PROMPTS], rows[-PROMPTS:]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=given.steps, per_device_train_batch_size=4,
            save_strategy="no", logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
            learning_rate=1e-4, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer: Any = Toy(
            model, arguments, train_dataset=[{"input_ids": ids, "labels": ids} for ids in learned]
        )
        trainer.prompts = [ids[:PROMPT] for ids in begun]
        trainer.rollouts, spent = SpecStats(), {"rollouts": 0.0, "policy": 0.0, "drafter": 0.0}
        trainer.seconds, learn = spent, OnlineTraining.learn

        def timed(self: Any, texts: Any) -> float:
            begun = time.process_time()
            loss = learn(self, texts)
            spent["drafter"] += time.process_time() - begun
            return loss

        trainer.generation_config = config
        more = {"train_drafter": given.train_drafter, "drafter_share": given.share}
        with (
            patch("time.perf_counter", time.process_time),
            patch.object(OnlineTraining, "learn", timed),
        ):
            trainer.add_callback(TRLCallback(trainer, **more))
            begun = time.process_time()
            trainer.train()
            whole = time.process_time() - begun
    entries = [entry for entry in trainer.state.log_history if "rollouts/tau" in entry]
    for first in range(0, len(entries), 20):
        part = entries[first : first + 20]
        print(f"steps {first + 1} on: tau {mean(one['rollouts/tau'] for one in part):.3f}")
    print(f"all: tau {mean(one['rollouts/tau'] for one in entries):.3f}")
    rollouts = trainer.rollouts
    parts = {name: getattr(rollouts, f"{name}_seconds") for name in PHASES}
    parts["rest"] = spent["rollouts"] - sum(parts.values())
    print(
        f"rollouts: {spent['rollouts']:.2f} s in {rollouts.num_steps} forwards, of "
        f"{rollouts.num_row_steps} rows and {rollouts.num_drafted_tokens} draft tokens in all"
    )
    print(", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items()))
    print(f"the policy's steps: {spent['policy']:.2f} s, all: {whole:.2f} s")
    if given.train_drafter:
        updates = sum(one["drafter/updates"] for one in entries)
        print(f"{updates:.0f} updates of the drafter: {spent['drafter']:.2f} s")


if __name__ == "__main__":
    main()
