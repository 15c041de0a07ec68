"""Trainings that go on from a trained adapter."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from peft import PeftConfig
from tiny_checkpoint import make_model
from trained import SETTINGS, TRAININGS, answers, decodes_exactly, weights

from hf_spec.tools.training.train import train

#: Heads, mask tokens with updates, layers, blocks with Markov heads, updates of the base.
NAMES = ("medusa", "space", "eagle3", "dspark", "layer_skip")


@pytest.mark.parametrize("name", NAMES)
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
    other = {"ttt_steps": 2, "loss": "ce"} if name == "eagle3" else {}
    record = train(make_model(), answers(), method, tmp_path / "b", other, arguments, start=before)
    assert other.items() <= record["config"].items()
    moved = weights(tmp_path / "b")
    learned = [key for key in old if old[key].is_floating_point()]
    assert sum(not torch.equal(moved[key], old[key]) for key in learned) >= len(learned) - 1
    assert record["trainable_parameters"] == fresh["trainable_parameters"]

    assert decodes_exactly(tmp_path / "b")


def test_what_the_adapter_has_learned_stays_its_own(trained, tmp_path):
    def go_on(name: str, **fields: Any) -> None:
        train(
            make_model(), answers(), TRAININGS[name][0], tmp_path / "x", fields, SETTINGS,
            start=trained(name),
        )  # fmt: skip

    with pytest.raises(ValueError, match="num_heads belongs to what the adapter has learned"):
        go_on("medusa", num_heads=3)
    with pytest.raises(ValueError, match="markov_rank belongs to what the adapter has learned"):
        go_on("dspark", markov_rank=8)
    with pytest.raises(ValueError, match="BITA: 'medusa' goes on from its own, of type MEDUSA"):
        train(make_model(), answers(), "medusa", tmp_path / "x", start=trained("bita"))
    assert not (tmp_path / "x").exists()
