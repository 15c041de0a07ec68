"""Recipes: YAML files with options of ``hf-spec train``."""

import pytest
from scripts import DOCS

from hf_spec.tools import cli
from hf_spec.tools.cli import train as command

RECIPES = sorted((DOCS / "recipes").glob("*.yaml"))


class Loaded(Exception):
    """The model was asked for: everything before was accepted."""


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What a training is given; it ends where the model would be loaded."""
    given = {}

    def load_model(model, dtype, device, pack):
        given.update(model=model, dtype=dtype, device=device)
        raise Loaded

    monkeypatch.setattr(command, "load_model", load_model)
    from hf_spec.tools.training import arguments

    real = arguments.spec_arguments

    def spec_arguments(method, folder, config, **more):
        made = real(method, folder, config, **more)
        given.update(method=method.name, output=folder, config=config, more=more, arguments=made)
        return made

    monkeypatch.setattr(arguments, "spec_arguments", spec_arguments)
    (tmp_path / "answers").mkdir()  # the data, which are not read
    monkeypatch.chdir(tmp_path)
    return given


def run(*words):
    with pytest.raises(Loaded):
        cli.main(["train", *map(str, words), "--device", "cpu"])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_of_the_documentation(recipe, asked):
    run("--recipe", recipe)
    assert asked["model"].count("/") == 1 and asked["method"] in ("medusa", "eagle3")
    assert asked["more"].keys() >= {"num_train_epochs", "per_device_train_batch_size"}
    assert f"hf-spec train --recipe docs/recipes/{recipe.name}" in recipe.read_text()
    assert len(RECIPES) >= 4


RECIPE = """\
method: medusa
model: org/model
data: answers
output: here
dtype: float32
num-heads: 2
learning_rate: 2e-3
report_to: [tensorboard]
lr_scheduler_kwargs: {min_lr: 0.1}
strategy_kwargs: {num_draft_tokens: 5}
bf16: false
max_steps: 7
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_a_recipe_is_options_and_the_command_line_wins(recipe, asked):
    run("--recipe", recipe)
    assert (asked["method"], asked["model"], asked["dtype"]) == ("medusa", "org/model", "float32")
    assert asked["output"].name == "here" and asked["config"].num_heads == 2
    made = asked["arguments"]
    assert (made.learning_rate, made.max_steps, made.bf16) == (2e-3, 7, False)
    assert made.report_to == ["tensorboard"] and made.lr_scheduler_kwargs == {"min_lr": 0.1}
    run("bita", "--recipe", write(recipe, "num-heads: 2\n", ""), "--max-steps", "9", "--model", "M")
    assert (asked["method"], asked["model"]) == ("bita", "M")
    assert asked["arguments"].max_steps == 9 and asked["arguments"].learning_rate == 2e-3


def write(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_steps: 7", "max_step: 7", "no option 'max_step' (did you mean 'max_steps'?)"),
        ("model: org", "modle: org", "no option 'modle' (did you mean 'model'?)"),
        ("num-heads: 2", "num_mask_tokens: 2", "there is no option 'num_mask_tokens'"),
        ("num-heads: 2", "num-heads: 0", "num_heads=0"),
        ("max_steps: 7", "max_steps: few", "max-steps: invalid int value: 'few'"),
        ("dtype: float32", "dtype: float31", "--dtype='float31'"),
        ("strategy_kwargs: {num_draft_tokens: 5}", "strategy_kwargs: {a: 5}", "has no option 'a'"),
        ("model: org", "model: {", "line 3: not YAML"),
        ("method: medusa", "method: medussa", "there is no method 'medussa'"),
        ("method: medusa\n", "", "needs a METHOD"),
        (RECIPE, "- 1", "must hold options by name"),
        ("max_steps: 7", "recipe: x", "there is no option 'recipe'"),
    ],
)
def test_what_is_wrong_with_a_recipe(recipe, asked, capsys, old, new, message):
    assert cli.main(["train", "--recipe", str(write(recipe, old, new))]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "model" not in asked


def test_no_such_recipe(asked, capsys, tmp_path):
    assert cli.main(["train", "--recipe", str(tmp_path / "none.yaml")]) == 2
    assert "cannot read the recipe" in capsys.readouterr().err


def test_data_that_is_not_there_is_refused_before_the_model_is_loaded(asked, capsys):
    assert cli.main(["train", "medusa", "--model", "M", "--data", "nowhere", "-o", "o"]) == 2
    assert "there is no folder or file 'nowhere'" in capsys.readouterr().err
    assert "model" not in asked
