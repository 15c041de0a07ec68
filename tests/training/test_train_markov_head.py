"""Markov heads: trained with an adapter, or added to one that was trained without."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import make_model, save_checkpoint
from trained import (
    SETTINGS,
    TRAININGS,
    Trained,
    answers,
    as_options,
    decodes_exactly,
    history,
    weights,
)

import hf_spec
from hf_spec.adapters.predicting import MARKOV_HEAD
from hf_spec.methods.registry import get_method
from hf_spec.tools import cli
from hf_spec.tools.training.train import train

#: Probes, heads with one more in the middle, and mask tokens with updates of the base.
METHODS = ("ppd", "propd", "space")


def with_one(folder: Path, output: Path, method: str, rank: int = 3, **more: Any) -> dict[str, Any]:
    """Train a Markov head of an adapter that has none."""
    fields, settings = {"markov_rank": rank}, {**SETTINGS, **more}
    return train(make_model(), answers(), method, output, fields, settings, start=folder)


@pytest.mark.parametrize("method", METHODS)
def test_only_the_markov_head_is_trained(trained: Trained, tmp_path: Path, method: str) -> None:
    """What the adapter had stays bit for bit."""
    before = trained(method)
    record = with_one(before, tmp_path / "after", method)
    old, new = weights(before), weights(tmp_path / "after")
    assert {name for name in new if name not in old} == {
        name for name in new if name.endswith(MARKOV_HEAD)
    }
    assert len(new) == len(old) + 3
    assert all(torch.equal(new[name], old[name]) for name in old)
    (output,) = (value for name, value in new.items() if name.endswith("markov_output"))
    assert output.flatten(1).any(1).all()  # it was zero
    assert record["trainable_parameters"] == len(output) * 3 * 3 * 32
    for name, value in (TRAININGS[method][1] | {"markov_rank": 3}).items():
        assert record["config"][name] == value
    # The folder is an adapter like any other, and says the same of the base.
    configs = [
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (before, tmp_path / "after")
    ]
    changed = {name for name in configs[0] if configs[0][name] != configs[1][name]}
    assert changed == {"markov_rank"}
    assert decodes_exactly(tmp_path / "after")


def test_the_token_before_is_learned(trained: Trained, tmp_path: Path) -> None:
    """Each token is followed by the next one in a circle: who knows the one before knows it."""
    more = {"max_steps": 60, "eval_steps": 60}
    record = with_one(trained("medusa"), tmp_path, "medusa", rank=16, **more)
    losses = history(tmp_path, "loss")
    assert losses[-1] < 0.8 * losses[0]
    assert record["best"]["eval_top1_1"] > 0.5  # of the heads alone: one in eight


def test_training_goes_on_where_it_was_broken_off(trained: Trained, tmp_path: Path) -> None:
    folder = trained("bita")
    whole = with_one(folder, tmp_path / "whole", "bita")
    with_one(folder, tmp_path / "parts", "bita", max_steps=3)
    # As an interrupted training of six steps leaves it behind: the schedule is that of six.
    (tmp_path / "parts" / "adapter_model.safetensors").unlink()
    parts = train(
        make_model(), answers(), "bita", tmp_path / "parts", {"markov_rank": 3}, SETTINGS,
        resume=True, start=folder,
    )  # fmt: skip
    steps = [[row["step"] for row in one["history"]] for one in (whole, parts)]
    assert steps[0] == steps[1]
    old = weights(folder)
    for name in ("whole", "parts"):
        new = weights(tmp_path / name)
        assert all(torch.equal(new[key], old[key]) for key in old)


def test_the_command(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, data = save_checkpoint(tmp_path / "base"), tmp_path / "rows.parquet"
    answers().to_parquet(str(data))
    common = as_options(base, data, **{**SETTINGS, "max_steps": 2, "eval_steps": 2, "held_out": 1})
    common.remove("--learning-rate=0.01")
    one, two = trained("bita"), tmp_path / "two"
    start = ["train", "bita", "--adapter", str(one), "--markov-rank", "128"]
    assert cli.main([*start, *common, "--output", str(two)]) == 0, capsys.readouterr().err
    old, new = weights(one), weights(two)
    assert all(torch.equal(new[name], old[name]) for name in old)
    distances = hf_spec.BitaConfig.from_pretrained(one).num_mask_tokens
    assert new["markov_output"].shape == (1 + distances, 32, 128)
    assert (two / "README.md").is_file() and (two / "training.json").is_file()
    assert hf_spec.SpecConfig.from_pretrained(two).assistant_strategy == "bita"

    hf_spec.LayerSkipConfig(skip_mlp=[1]).save_pretrained(tmp_path / "skip")
    hf_spec.SpaceConfig(update="full").save_pretrained(tmp_path / "full")
    for arguments, message in (
        (
            ["train", "bita", "--adapter", str(two), "--markov-rank", "64"],
            r"markov_rank=64: the adapter .* has a Markov head of rank 128",
        ),
        (["train", "bita", "--adapter", str(two), "--markov-rank", "0"], "rank 128"),
        ([*start, "--num-mask-tokens", "3"], r"num_mask_tokens belongs to what the adapter has"),
        ([*start, "--markov-rank", "-1"], r"markov_rank=-1: must be a whole number"),
        ([*start, "--rank", "3"], r"has no option '--rank'"),
        ([*start, "--learning-rate", "1"], "--markov-learning-rate"),
        (["train", "medusa", "--adapter", str(one)], r"is of 'bita': give 'hf-spec train bita'"),
        (
            ["train", "layer_skip", "--adapter", str(tmp_path / "skip")],
            r"skip' has no adapter_model.safetensors: there is nothing to go on from",
        ),
        (["train", "space", "--adapter", str(tmp_path / "full")], "trains its base model, too"),
    ):
        more = [*common, "--output", str(tmp_path / "three")]
        assert cli.main([*arguments[:4], *more, *arguments[4:]]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error), error
    assert not (tmp_path / "three").exists()


def test_parts_have_learning_rates_of_their_own(tmp_path: Path) -> None:
    from peft import get_peft_model

    from hf_spec.tools.training.train import spec_arguments
    from hf_spec.tools.training.trainer import SpecTrainer

    config = hf_spec.SpaceConfig(
        rank=2, markov_rank=3, markov_learning_rate=0.25, update_learning_rate=0.125
    )
    model = get_peft_model(make_model(), config)
    given = {"max_steps": 4, "learning_rate": 0.5}
    arguments = spec_arguments(get_method("space"), tmp_path, config, **given)
    trainer = SpecTrainer(
        model=model, args=arguments, train_dataset=answers(), eval_dataset=answers()
    )
    rates = {
        id(parameter): group["lr"]
        for group in trainer.create_optimizer().param_groups
        for parameter in group["params"]
    }
    found = {
        name: rates[id(parameter)]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert len(found) == len(rates) == 1 + 3 + 2 * 2
    for name, rate in found.items():
        part = name.rpartition(".default.")[2]
        if part.startswith("markov"):
            assert rate == 0.25, name
        else:
            assert rate == (0.5 if part == "masks" else 0.125), name
