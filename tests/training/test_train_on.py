"""Trainings that go on from a trained adapter, and what its parts are trained with."""

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from peft import PeftConfig, get_peft_model
from tiny_checkpoint import make_model, save_checkpoint
from trained import SETTINGS, TRAININGS, answers, as_options, decodes_exactly, weights

import hf_spec
from hf_spec.methods.registry import get_method
from hf_spec.tools import cli
from hf_spec.tools.training.arguments import spec_arguments
from hf_spec.tools.training.train import train
from hf_spec.tools.training.trainer import SpecTrainer


# Heads, mask tokens with updates, layers, blocks with Markov heads, updates of the base.
@pytest.mark.parametrize("name", ["medusa", "space", "eagle3", "dspark", "layer_skip"])
def test_weights_are_those_that_training_begins_with(trained, tmp_path, name):
    """With a learning rate of almost 0 they stay; with another all of them move."""
    before, method = trained(name), TRAININGS[name][0]
    old = weights(before)
    stored: Any = PeftConfig.from_pretrained(before)
    rates = [one.name for one in dataclasses.fields(stored) if one.name.endswith("learning_rate")]
    still = {**dict.fromkeys(rates, 1e-12)}
    arguments = {**SETTINGS, "max_steps": 3, "learning_rate": 1e-12}
    record = train(make_model(), answers(), method, tmp_path / "a", still, arguments, start=before)
    new = weights(tmp_path / "a")
    assert new.keys() == old.keys() and record["started_from"] == before.name
    for key in old:
        torch.testing.assert_close(new[key], old[key], rtol=0, atol=1e-9)
    fresh = json.loads((before / "training.json").read_text())
    assert record["best"]["eval_loss"] == pytest.approx(fresh["best"]["eval_loss"], rel=1e-5)

    arguments["learning_rate"] = 1e-2
    other = {"ttt_steps": 2, "loss": "hard"} if name == "eagle3" else {}
    record = train(make_model(), answers(), method, tmp_path / "b", other, arguments, start=before)
    assert other.items() <= record["config"].items()
    moved = weights(tmp_path / "b")
    learned = [key for key in old if old[key].is_floating_point()]
    assert sum(not torch.equal(moved[key], old[key]) for key in learned) >= len(learned) - 1
    assert record["trainable_parameters"] == fresh["trainable_parameters"]

    assert decodes_exactly(tmp_path / "b")


def test_adapters_that_cannot_be_gone_on_from(trained, tmp_path, capsys):
    base, data = save_checkpoint(tmp_path / "base"), tmp_path / "rows.parquet"
    answers().to_parquet(str(data))
    common = as_options(base, data, **{**SETTINGS, "max_steps": 2, "eval_steps": 2, "held_out": 1})
    hf_spec.LayerSkipConfig(skip_mlp=[1]).save_pretrained(tmp_path / "skip")
    hf_spec.SpaceConfig(update="full").save_pretrained(tmp_path / "full")
    one = str(trained("bita"))
    for arguments, message in (
        (["bita", one, "--markov-rank", "64"], "markov_rank belongs to what the adapter has"),
        (["bita", one, "--rank", "3"], "has no option '--rank'"),
        (["medusa", one], r"of type BITA: 'medusa' goes on from its own, of type MEDUSA"),
        (
            ["layer_skip", str(tmp_path / "skip")],
            "skip' has no adapter_model.safetensors: there is nothing to go on from",
        ),
        (["space", str(tmp_path / "full")], "trains its base model, too"),
    ):
        method, folder, *more = arguments
        command = ["train", method, "--adapter", folder, *common, *more]
        assert cli.main([*command, "--output", str(tmp_path / "three")]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error), error
    assert not (tmp_path / "three").exists()


def test_parts_have_learning_rates_of_their_own(tmp_path):
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
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    assert len(trained) == len(rates) == 1 + 3 + 2 * 2
    for name, one in trained:
        part = name.rpartition(".default.")[2]
        expected = 0.25 if part.startswith("markov") else 0.5 if part == "masks" else 0.125
        assert rates[id(one)] == expected, name
