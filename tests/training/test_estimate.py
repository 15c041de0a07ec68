"""What a training holds, told without weights, beside what it does hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import answers
from tiny_checkpoint import make_model, save_checkpoint
from transformers import LlamaConfig, TrainerCallback

from hf_spec import cli
from hf_spec.methods.registry import get_method
from hf_spec.training.estimate import estimate, meta_model
from hf_spec.training.start import fresh
from hf_spec.training.train import TrainSettings, train, trainable


class Held(TrainerCallback):
    """Bytes of what the Trainer holds when gradients are there, and after the first step."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        parameters = list(model.parameters())
        own = [one for name, one in model.named_parameters() if "spec_modules" in name]
        known = {id(one) for one in own}
        self.found["adapter"] = sum(one.nbytes for one in own)
        self.found["base"] = sum(one.nbytes for one in parameters if id(one) not in known)
        self.found["gradients"] = sum(p.grad.nbytes for p in parameters if p.grad is not None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        states = kwargs["optimizer"].state.values()
        self.found["optimizer"] = sum(
            value.nbytes
            for state in states
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim  # the count of steps is a number
        )


@pytest.mark.parametrize(
    ("method", "fields"),
    [(name, {}) for name in trainable() if name != "layer_skip"]
    + [("layer_skip", {"draft_rank": 4, "skip_mlp": [1]}), ("space", {"update": "full"})],
)
def test_the_parts_are_those_of_a_training(
    tmp_path: Path, method: str, fields: dict[str, Any]
) -> None:
    model, held = make_model().bfloat16(), Held()
    settings = TrainSettings(
        max_steps=1, eval_steps=1, held_out=2, served_prompts=1, served_tokens=2, batch_size=2,
        num_anchors=4, arguments={"eval_strategy": "no", "load_best_model_at_end": False},
    )  # fmt: skip
    save_checkpoint(tmp_path / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_spec.training.train.save_model", lambda *_: None)
        train(model, answers(), method, tmp_path / "out", fields, settings, callbacks=[held])
    base = meta_model(str(tmp_path / "base"), "bfloat16")
    assert all(one.is_meta for one in base.parameters())
    found = estimate(base, fresh(get_method(method), base, fields))
    assert {name: getattr(found, name) for name in held.found} == held.found
    assert found.memory == sum(held.found.values())


def test_a_model_of_seven_billions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a folder with a config and nothing else."""
    LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        vocab_size=32000,
    ).save_pretrained(tmp_path)  # fmt: skip
    assert not cli.main([
        "train", "medusa", "--model", str(tmp_path), "--dry-run", "--transition-rank", "0",
        "--max-length", "512", "--training-args", '{"gradient_accumulation_steps": 4}',
    ])  # fmt: skip
    printed = capsys.readouterr().out
    blocks = 4 * (4096 * 4096 + 4096)
    assert f"parameters: 6,738,415,616 of the base model, {blocks:,} trained" in printed
    assert f"base model         {6738415616 * 2 / 2**20:10,.1f} MiB" in printed
    assert f"optimiser (AdamW)  {blocks * 8 / 2**20:10,.1f} MiB" in printed
    assert "tokens per step: at most 16,384 on each device, 32 sequences of 512" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "bita", "--model", str(tmp_path), "--dry-run"]) == 2
    assert "cannot read the config of" in capsys.readouterr().err
