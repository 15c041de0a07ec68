"""A base model that is trained along with its adapter: SPACE with `update="full"`."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from running import configured
from safetensors.torch import load_file
from tiny_checkpoint import make_model, save_checkpoint
from trained import (
    SETTINGS,
    TRAININGS,
    answers,
    as_options,
    history,
    record,
    same,
    weights,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import hf_spec
from hf_spec.methods.registry import get_method
from hf_spec.tools import cli
from hf_spec.tools.training.arguments import spec_arguments
from hf_spec.tools.training.train import train
from hf_spec.tools.training.trainer import base_state, load_checkpoint

FULL = TRAININGS["full"][1]


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in base_state(model).items()}


def test_the_trained_base_is_a_model_of_its_own(tmp_path, capsys):
    checkpoint, out = save_checkpoint(tmp_path / "m"), tmp_path / "out"
    answers().to_parquet(tmp_path / "rows.parquet")
    config = {**FULL, "markov_rank": 0, "p_ar": 0.1}
    settings = {**SETTINGS, "max_steps": 60, "eval_steps": 30}
    options = as_options(checkpoint, tmp_path / "rows.parquet", **settings, **config)
    code = cli.main(["train", "space", *options, "--output", str(out)])
    assert code == 0, capsys.readouterr().err
    before = state(AutoModelForCausalLM.from_pretrained(checkpoint))
    loaded = AutoModelForCausalLM.from_pretrained(out / "model")
    after = state(loaded)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    made = record(out)
    assert made["trainable_parameters"] == sum(t.numel() for t in after.values()) + 2 * 32
    assert made["base_model"] == str(out / "model")
    assert history(out, "loss")[-1] < 0.5 * history(out, "loss")[0]
    card = (out / "README.md").read_text()
    assert "**All weights were fine-tuned**" in card and "| 2 | " in card
    assert str(out / "model") in card
    # An ordinary checkpoint, and an adapter of mask tokens that points to it.
    assert AutoTokenizer.from_pretrained(out / "model")("Hi")["input_ids"]
    assert [*weights(out)] == ["masks"]
    loaded.load_adapter(str(out))
    assert loaded.peft_config["default"].base_model_name_or_path == str(out / "model")
    ids = torch.tensor([[4, 5, 6, 7, 4, 5, 6, 7]])
    kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = loaded.generate(ids, **kwargs)
    assert plain[0, 8:].tolist() == [4, 5, 6, 7] * 3
    spec = hf_spec.SpecConfig.from_pretrained(out, **kwargs)
    assert loaded.generate(ids, **configured(spec)).tolist() == plain.tolist()
    assert hf_spec.last_stats(loaded).mean_accepted_tokens > 1.5


def test_the_checkpoint_of_the_smallest_loss_is_kept_with_its_base(tmp_path):
    """The learning rate is far too large in the end: the last checkpoint is not the best."""

    class Blow(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= 3:
                for group in kwargs["optimizer"].param_groups:
                    group["lr"] = 1.0

    model = make_model()
    made = train(model, answers(), "space", tmp_path, FULL, SETTINGS, callbacks=[Blow()])
    losses = history(tmp_path, "eval_loss")
    assert losses[0] < losses[1] and made["best"]["step"] == 3
    assert not hasattr(model, "spec_modules")
    kept = load_file(tmp_path / "checkpoints" / "checkpoint-3" / "base_model.safetensors")
    assert same(state(model), kept)
    assert same(state(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), kept)
    other = load_file(tmp_path / "checkpoints" / "checkpoint-6" / "base_model.safetensors")
    assert not same(kept, other)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("--update full", "float32"), ("--update full --dtype bfloat16", "bfloat16"),
     ("--update gated", "native")],
)  # fmt: skip
def test_a_base_that_is_trained_has_32_bits_by_default(tmp_path, monkeypatch, words, expected):
    """In 16 bits most steps of its training are rounded away."""
    (tmp_path / "d").mkdir()
    load = Mock(side_effect=ValueError("enough"))
    monkeypatch.setattr("hf_spec.tools.cli.train.load_model", load)
    places = ["--model", "m", "--data", str(tmp_path / "d"), "--output", str(tmp_path / "out")]
    assert cli.main(["train", "space", *places, *words.split()]) == 2
    assert load.call_args.args[1] == expected


def test_a_trained_base_computes_in_16_bits(tmp_path):
    """Its weights, and their steps, have 32."""
    model = make_model()
    before = state(model)
    settings = {**SETTINGS, "max_steps": 2, "eval_steps": 2, "bf16": True, "learning_rate": 1e-5}
    train(model, answers(), "space", tmp_path, FULL, settings)
    for name, one in state(model).items():
        assert one.dtype == torch.float32
        assert not torch.equal(one, before[name]), name


def test_checkpoints_of_something_else_are_refused(trained, tmp_path):
    with pytest.raises(ValueError, match=r"holds no base_model\.safetensors"):
        load_checkpoint(make_model(), tmp_path)
    with pytest.raises(ValueError, match="weights of another model"):
        load_checkpoint(make_model(layers=3), trained("full") / "checkpoints" / "checkpoint-3")


@pytest.mark.parametrize("name", ["space", "lora", "none"])
def test_otherwise_the_base_is_not_written(trained, name):
    folder = trained(name)
    assert not (folder / "model").exists()
    assert not list(folder.rglob("base_model.safetensors"))
    per_layer = {"space": 96, "lora": 2 * 64 + 2 * 48 + 3 * 96, "none": 0}[name]
    values = (value for value in weights(folder).values() if value.is_floating_point())
    assert sum(value.numel() for value in values) == 2 * 32 + 2 * 2 * per_layer


def test_defaults_follow_the_config(tmp_path):
    method, rates = get_method("space"), {}
    for update in ("gated", "lora", "full", "none"):
        config = hf_spec.SpaceConfig(update=update)
        arguments = spec_arguments(method, tmp_path, config)
        rates[update] = arguments.learning_rate
        # The paper's, where the model is fine-tuned; what learns to guess it takes longer.
        tuned = update in ("lora", "full")
        assert arguments.num_train_epochs == (2 if tuned else 8)
        assert arguments.metric_for_best_model == ("loss" if tuned else "tau")
        assert arguments.greater_is_better == (not tuned)
    assert rates == {"gated": 3e-3, "lora": 1e-3, "full": 5e-5, "none": 3e-2}
    chosen = spec_arguments(method, tmp_path, hf_spec.SpaceConfig(), learning_rate=0.5)
    assert chosen.learning_rate == 0.5
