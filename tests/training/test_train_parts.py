"""What an adapter's parts are trained with, and which trainings are refused."""

import re

from tiny_checkpoint import make_model, save_checkpoint
from trained import SETTINGS, answers, as_options

import hf_spec
from hf_spec.methods.registry import get_method
from hf_spec.tools import cli


def test_adapters_that_cannot_be_gone_on_from(trained, tmp_path, capsys):
    base, data = save_checkpoint(tmp_path / "base"), tmp_path / "rows.parquet"
    answers().to_parquet(str(data))
    common = as_options(base, data, **{**SETTINGS, "max_steps": 2, "eval_steps": 2, "held_out": 1})
    hf_spec.LayerSkipConfig(skip_mlp=[1]).save_pretrained(tmp_path / "skip")
    hf_spec.SpaceConfig(update="full").save_pretrained(tmp_path / "full")
    one = str(trained("bita"))
    for arguments, message in (
        (["bita", one, "--markov-rank", "64"], "markov_rank belongs to what the adapter has"),
        (["bita", one, "--num-mask-tokens", "3"], "num_mask_tokens belongs to what the adapter"),
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
