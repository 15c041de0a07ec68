"""A base model that is trained along with its adapter: SPACE with `update="full"`, end to end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from running import configured, drafting
from safetensors.torch import load_file
from tiny_checkpoint import make_model, save_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from two_processes import assert_same_history, run_both

import hf_spec
from hf_spec import cli
from hf_spec.methods.registry import get_method
from hf_spec.training.anchors import AnswerDataset, collate
from hf_spec.training.base_weights import base_state, load_checkpoint
from hf_spec.training.train import bit_sums, spec_arguments, train

SETTINGS: dict[str, Any] = {
    "max_steps": 4, "eval_steps": 2, "held_out": 4, "served_prompts": 2, "served_tokens": 8,
    "per_device_train_batch_size": 4, "num_anchors": 4, "learning_rate": 1e-2,
}  # fmt: skip
FULL = {"update": "full", "num_mask_tokens": 2, "transition_rank": 0, "draft_vocab_size": 0}


def answers(count: int = 24, length: int = 20) -> Dataset:
    rows = []
    for index in range(count):
        tokens = [4 + (index + step) % 4 for step in range(8 + length)]
        rows.append({"prompt_ids": tokens[:8], "answer_ids": tokens[8:]})
    return Dataset.from_list(rows)


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in base_state(model).items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_trained_base_is_a_model_of_its_own(tmp_path: Path) -> None:
    model = make_model()
    before = state(model)
    tokenizer = AutoTokenizer.from_pretrained(save_checkpoint(tmp_path / "base"))
    out = tmp_path / "out"
    settings = {**SETTINGS, "max_steps": 60, "eval_steps": 30}
    config = {**FULL, "p_ar": 0.1}
    record = train(model, answers(), "space", out, config, settings, tokenizer=tokenizer)
    after = state(model)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert not hasattr(model, "spec_modules")
    assert record["trainable_parameters"] == sum(t.numel() for t in after.values()) + 2 * 32
    assert record["base_model"] == str(out / "model")
    losses = [row["loss"] for row in record["history"] if "loss" in row]
    assert losses[-1] < 0.5 * losses[0]
    # An ordinary checkpoint, and an adapter of mask tokens that points to it.
    loaded = AutoModelForCausalLM.from_pretrained(out / "model")
    assert same(state(loaded), after)
    assert AutoTokenizer.from_pretrained(out / "model")("Hi")["input_ids"]
    assert [name.rpartition(".")[2] for name in load_file(out / "adapter_model.safetensors")] == [
        "space_masks"
    ]
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(out / "model")
    loaded.load_adapter(str(out))
    ids = torch.tensor([[4, 5, 6, 7, 4, 5, 6, 7]])
    kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = loaded.generate(ids, **kwargs)
    assert plain[0, 8:].tolist() == [4, 5, 6, 7] * 3
    spec = hf_spec.SpecConfig.from_pretrained(out, **kwargs)
    assert loaded.generate(ids, **configured(spec)).tolist() == plain.tolist()
    assert hf_spec.last_stats(loaded).mean_accepted_tokens > 1.5


def test_the_checkpoint_of_the_smallest_loss_is_kept_with_its_base(tmp_path: Path) -> None:
    """The learning rate is far too large in the end: the last checkpoint is not the best."""

    class Blow(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= 2:
                for group in kwargs["optimizer"].param_groups:
                    group["lr"] = 1.0

    model = make_model()
    record = train(model, answers(), "space", tmp_path, FULL, SETTINGS, callbacks=[Blow()])
    losses = {row["step"]: row["eval_loss"] for row in record["history"] if "eval_loss" in row}
    assert losses[2] < losses[4] and record["best"]["step"] == 2
    kept = load_file(tmp_path / "checkpoints" / "checkpoint-2" / "base_model.safetensors")
    assert same(state(model), kept)
    assert same(state(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), kept)
    other = load_file(tmp_path / "checkpoints" / "checkpoint-4" / "base_model.safetensors")
    assert not same(kept, other)


def test_resumed_training_equals_uninterrupted(tmp_path: Path) -> None:
    whole = make_model()
    train(whole, answers(), "space", tmp_path / "whole", FULL, SETTINGS)
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "checkpoint-4")
    resumed = make_model()
    settings = SETTINGS
    train(resumed, answers(), "space", tmp_path / "part", FULL, settings, resume=True)
    assert same(state(resumed), state(whole))
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("whole", "part")]
    assert same(*(load_file(path) for path in files))


def test_checkpoints_of_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no base_model\.safetensors"):
        load_checkpoint(make_model(), tmp_path)
    train(make_model(), answers(), "space", tmp_path, FULL, SETTINGS)
    with pytest.raises(ValueError, match="weights of another model"):
        load_checkpoint(make_model(layers=3), tmp_path / "checkpoints" / "checkpoint-2")


@pytest.mark.parametrize("update", ["gated", "lora", "none"])
def test_otherwise_the_base_stays_as_it_was(tmp_path: Path, update: str) -> None:
    model = make_model()
    before = bit_sums(list(model.parameters()))
    config = {"update": update, "num_mask_tokens": 2, "rank": 2}
    record = train(model, answers(), "space", tmp_path, config, SETTINGS)
    assert bit_sums(list(model.parameters())) == before
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.rglob("base_model.safetensors"))
    per_layer = {"gated": 96, "lora": 2 * 64 + 2 * 48 + 3 * 96, "none": 0}
    transition = (1 + 2) * 3 * 32 * 128  # V, S, U, and those of two distances
    assert record["trainable_parameters"] == 2 * 32 + 2 * 2 * per_layer[update] + transition
    # What was written is what was trained, in a base like the first.
    model.load_adapter(str(tmp_path))
    ids = torch.tensor([[4, 5, 6, 7, 4, 5, 6, 7]])
    kwargs = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **kwargs)
    assert model.generate(ids, **kwargs, **drafting("space")).tolist() == plain.tolist()
    changed = not torch.equal(plain, make_model().generate(ids, **kwargs))
    assert changed == (update == "lora")


def test_defaults_follow_the_config(tmp_path: Path) -> None:
    method, rates = get_method("space"), {}
    for update in ("gated", "lora", "full", "none"):
        config = hf_spec.SpaceConfig(update=update)
        arguments = spec_arguments(method, tmp_path, config)
        rates[update] = arguments.learning_rate
        assert arguments.per_device_train_batch_size == 8
        # The paper's, where the model is fine-tuned; what learns to guess it takes longer.
        tuned = update in ("lora", "full")
        assert arguments.num_train_epochs == (2 if tuned else 8)
        assert arguments.metric_for_best_model == ("loss" if tuned else "tau")
        assert arguments.greater_is_better == (not tuned)
    assert rates == {"gated": 3e-3, "lora": 1e-3, "full": 5e-5, "none": 3e-2}
    chosen = spec_arguments(method, tmp_path, hf_spec.SpaceConfig(), learning_rate=0.5)
    assert chosen.learning_rate == 0.5


def test_nothing_to_train_is_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--update", "none", "--p-ar", "1.0"]
    rest = ["--model", "none", "--data", "none", "--output", str(tmp_path / "out")]
    assert cli.main(["train", "space", *rest, *given]) == 2
    assert "update='none' with p_ar=1.0: nothing is trained" in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_checkpoint(tmp_path / "m")
    (tmp_path / "data").mkdir()
    answers(8).to_parquet(str(tmp_path / "data" / "rows.parquet"))
    out = tmp_path / "out"
    code = cli.main(
        ["train", "space", "--model", str(base), "--data", str(tmp_path / "data"),
         "--output", str(out), "--dtype", "float32", "--device", "cpu", "--max-steps", "2",
         "--eval-steps", "2", "--held-out", "2", "--served-prompts", "1", "--served-tokens", "4",
         "--update", "full", "--num-mask-tokens", "2"]
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    assert (out / "model" / "model.safetensors").is_file()
    assert (out / "model" / "tokenizer_config.json").is_file()
    card = (out / "README.md").read_text()
    assert "**All weights were fine-tuned**" in card and "| 2 | 0." in card
    assert str(out / "model") in card


#: Everything that trains low-rank updates or the base itself.
TRAINED = {
    "gated": ("space", {"update": "gated", "num_mask_tokens": 2, "rank": 2}),
    "lora": ("space", {"update": "lora", "num_mask_tokens": 2, "rank": 2}),
    "full": ("space", FULL),
    "draft": ("layer_skip", {"skip_mlp": [0], "draft_rank": 2}),
}


@pytest.mark.parametrize("case", TRAINED)
def test_checkpointing_and_accumulation_change_nothing(tmp_path: Path, case: str) -> None:
    histories = []
    for index, arguments in enumerate(
        (
            {},
            {"gradient_checkpointing": True},
            {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        )
    ):
        method, config = TRAINED[case]
        settings = {**SETTINGS, **arguments}
        record = train(make_model(), answers(), method, tmp_path / str(index), config, settings)
        histories.append([row["eval_loss"] for row in record["history"] if "eval_loss" in row])
    assert len(histories[0]) == 2
    for other in histories[1:]:
        assert other == pytest.approx(histories[0], rel=1e-3)  # rounding, after some steps of Adam


def test_every_parameter_has_a_gradient_without_mask_tokens() -> None:
    """DDP waits for all of them, also where a process has no sequence with mask tokens."""
    config = hf_spec.SpaceConfig(update="lora", num_mask_tokens=2, rank=2, p_ar=1.0)
    model = get_peft_model(make_model(), config).train()
    data = AnswerDataset(answers(2), 4)
    model(**collate([data[0], data[1]]))["loss"].backward()
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)


def test_two_processes_give_the_loss_of_one(tmp_path: Path) -> None:
    """gloo, on two halves of each batch; which loss a sequence has does not depend on it."""
    program = """
        from test_train_base import SETTINGS, TRAINED, answers, make_model
        from hf_spec.training.train import train
        arguments = {"logging_steps": 1}
        for case, (method, config) in TRAINED.items():
            settings = {**SETTINGS, "per_device_train_batch_size": size, **arguments}
            train(make_model(), answers(), method, output / case, config, settings)
    """
    one, two = run_both(program, tmp_path)
    for case in TRAINED:
        assert_same_history(one / case, two / case, rel=1e-3)
