"""Training with DeepSpeed in two processes on the CPU, as ``accelerate launch`` starts it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_sharded import own_answers
from tiny_checkpoint import make_model, save_checkpoint
from trained import same, weights
from two_processes import assert_same_history

from hf_spec.training.train import train

SETTINGS: dict[str, Any] = {
    "max_steps": 9, "eval_steps": 3, "held_out": 4, "served_prompts": 2, "served_tokens": 8,
    "num_anchors": 4, "learning_rate": 5e-2,
}  # fmt: skip


def launch(stage: int, *arguments: str) -> None:
    """``hf-spec train`` with the model sharded from its loading on where the stage is 3."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--zero_stage",
        str(stage), "--num_processes", "2", "--main_process_port", "0", "-m", "hf_spec.cli",
        "train", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.environment
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("method", ["bita", "layer_skip"])
def test_two_processes_with_deepspeed_give_the_figures_of_one(
    tmp_path: Path, stage: int, method: str
) -> None:
    """So does a training that was resumed; embeddings, heads and layers are all read whole."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed, see CONTRIBUTING.md")
    model = make_model(layers=4)
    checkpoint = tmp_path / "model"
    save_checkpoint(checkpoint, layers=4)
    rows = own_answers(model)
    rows.to_parquet(tmp_path / "answers.parquet")
    skipped = {"skip_attention": [1, 2], "skip_mlp": [1, 2], "draft_rank": 4}
    config = skipped if method == "layer_skip" else {}
    one, two, resumed = (tmp_path / name for name in ("one", "two", "resumed"))
    train(
        model,
        rows,
        method,
        one,
        config,
        {**SETTINGS, "per_device_train_batch_size": 4, "logging_steps": 1},
    )
    options = [
        method, "--model", str(checkpoint), "--data", str(tmp_path / "answers.parquet"),
        "--dtype", "float32", "--per-device-train-batch-size", "2", "--logging-steps", "1",
        *(f"--{name.replace('_', '-')}={json.dumps(value)}"
          for name, value in {**SETTINGS, **config}.items()),
    ]  # fmt: skip
    launch(stage, *options, "--output", str(two))
    assert_same_history(one, two, rel=1e-4)
    shutil.copytree(two, resumed)
    shutil.rmtree(resumed / "checkpoints" / "checkpoint-9")
    launch(stage, *options, "--output", str(resumed), "--resume")
    assert same(weights(resumed), weights(two))
    # Gradients are summed in another order, which AdamW's first steps enlarge.
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-3)
