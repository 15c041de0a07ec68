"""GRPO with TRL's defaults, whose rollouts are drafted: python grpo.py MODEL OUTPUT

Needs ``pip install trl``. Rollouts are those of plain ``generate`` with the current weights.
"""

import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from hf_spec.integrations import TRLCallback

PROMPTS = [f"Name {number} animals, separated by commas." for number in range(2, 10)]


def reward(completions, **_):
    """Many different words, separated by commas."""
    return [float(len({word.strip() for word in text.split(",")})) for text in completions]


def train(model, output_dir: str, **settings):
    """A trainer after training; ``settings`` are fields of ``GRPOConfig``."""
    settings = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 64,
        "max_steps": 20,
        "generation_kwargs": {"assistant_strategy": "auto"},
        **settings,
    }
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        args=GRPOConfig(output_dir=output_dir, **settings),
    )
    # Logs what rollouts gain. With history=hf_spec.RolloutHistory(), answers of the epoch before
    # draft, too; rollouts then share random numbers with these (docs/guides/rollouts.md).
    trainer.add_callback(TRLCallback(trainer))
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(*sys.argv[1:3])
