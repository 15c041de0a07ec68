"""Training end to end on a tiny model: what is learned, kept, resumed, recorded and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from datasets import Dataset
from running import configured, drafting
from tiny_checkpoint import make_model, save_checkpoint
from transformers import TrainerCallback
from two_processes import assert_same_history, run_both

import hf_spec
from hf_spec import cli
from hf_spec.cli.train import parse_arguments, take_fields
from hf_spec.methods.registry import get_method
from hf_spec.training.served import Served
from hf_spec.training.train import (
    bit_sums,
    check_lengths,
    config_fields,
    own_arguments,
    spec_arguments,
    split,
    train,
    trainable,
)


def answers(count: int = 24, length: int = 24) -> Dataset:
    """Counting in a circle of four: a few tokens, whose shares probes learn at once."""
    rows = []
    for index in range(count):
        tokens = [4 + (index + step) % 4 for step in range(8 + length)]
        rows.append({"prompt_ids": tokens[:8], "answer_ids": tokens[8:]})
    return Dataset.from_list(rows)


SETTINGS: dict[str, Any] = {
    "max_steps": 6, "eval_steps": 3, "held_out": 4, "served_prompts": 2, "served_tokens": 8,
    "per_device_train_batch_size": 4, "num_anchors": 4, "learning_rate": 1e-2,
}  # fmt: skip
CONFIG = {"num_mask_tokens": 2, "num_prompt_tokens": 4}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_loss_falls_and_the_base_stays(tmp_path: Path) -> None:
    model = make_model()
    before = bit_sums(list(model.parameters()))
    settings = {**SETTINGS, "max_steps": 60, "eval_steps": 30, "learning_rate": 5e-2}
    record = train(model, answers(), "bita", tmp_path, CONFIG, settings)
    losses = [row["loss"] for row in record["history"] if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert bit_sums(list(model.parameters())) == before
    assert not hasattr(model, "spec_modules")
    assert all(parameter.requires_grad for parameter in model.parameters())
    transition = (1 + 2) * 3 * 32 * 128  # V, S, U, and those of two distances
    assert record["trainable_parameters"] == 2 * 32 + 2 * 2 * 2 * 4 * 8 + transition
    written = json.loads((tmp_path / "training.json").read_text())
    assert written == json.loads(json.dumps(record))


def test_the_adapter_that_is_written_is_the_one_of_largest_tau(tmp_path: Path) -> None:
    model = make_model()
    record = train(model, answers(), "bita", tmp_path, CONFIG, SETTINGS)
    taus = {row["step"]: row["eval_tau"] for row in record["history"] if "eval_tau" in row}
    assert set(taus) == {3, 6}
    best = record["best"]["step"]
    assert taus[best] == max(taus.values())
    assert equal(weights(tmp_path), weights(tmp_path / "checkpoints" / f"checkpoint-{best}"))
    # Served figures are those of real decoding with the adapter.
    model.load_adapter(tmp_path)
    config = hf_spec.SpecConfig.from_pretrained(tmp_path)
    assert config.assistant_strategy == "bita"
    ids = torch.tensor([answers()[0]["prompt_ids"]])
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    ours = model.generate(ids, **configured(config), max_new_tokens=12, do_sample=False)
    assert ours.tolist() == plain.tolist()


class Padding(TrainerCallback):
    """Adds up the padding of an epoch."""

    def on_train_begin(self, *args: Any, train_dataloader: Any, **kwargs: Any) -> None:
        self.tokens = sum(int((batch["attention_mask"] == 0).sum()) for batch in train_dataloader)


def test_batches_of_similar_length_have_less_padding(tmp_path: Path) -> None:
    rows = answers(100, 60)
    rows = rows.map(
        lambda row, i: {"answer_ids": row["answer_ids"][: 4 + 11 * i % 56]}, with_indices=True
    )
    found = {}
    for strategy in ("random", "group_by_length"):
        settings = {**SETTINGS, "max_steps": 1, "train_sampling_strategy": strategy}
        padding = Padding()
        train(
            make_model(), rows, "medusa", tmp_path / strategy, {"num_heads": 2}, settings,
            callbacks=[padding],
        )  # fmt: skip
        found[strategy] = padding.tokens
    assert found["group_by_length"] < found["random"]


def test_served_tau_is_that_of_decoding(tmp_path: Path) -> None:

    model = make_model()
    train(model, answers(), "bita", tmp_path, CONFIG, SETTINGS)
    model.load_adapter(tmp_path)
    prompts = [answers()[row]["prompt_ids"][: 8 - row] for row in range(3)]
    options = {"tree": "efficient", "top_k": 2}
    stats = Served(prompts, "bita", options, 10, batch_size=2).measure(model)
    steps = tokens = 0
    for prompt in prompts:
        model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False,
            **drafting("bita", **options),
        )  # fmt: skip
        alone = hf_spec.last_stats(model)
        steps, tokens = steps + alone.num_row_steps, tokens + alone.num_generated_tokens
    assert (stats.num_row_steps, stats.num_generated_tokens) == (steps, tokens)


def test_measurements_do_not_depend_on_those_before() -> None:
    model, prompts = make_model(), [row["prompt_ids"] for row in answers()][:3]
    served = Served(prompts, "layer_skip", {"skip_mlp": [1], "draft_exit": "adaptive"}, 10)
    found = []
    for _ in range(2):
        stats = served.measure(model)
        found.append((stats.num_row_steps, hf_spec.last_stats(model).details["threshold"]))
    assert found[0] == found[1] and found[0][1] != 0.6, "the threshold has to move"


class Stop(TrainerCallback):
    """Breaks off after a checkpoint, as a crash would."""

    def __init__(self, at: int = 3):
        self.at = at

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            raise KeyboardInterrupt


def test_resumed_training_equals_uninterrupted(tmp_path: Path) -> None:
    settings = SETTINGS
    whole = train(make_model(), answers(), "bita", tmp_path / "whole", CONFIG, settings)
    arguments = (answers(), "bita", tmp_path / "parts", CONFIG, settings)
    with pytest.raises(KeyboardInterrupt):
        train(make_model(), *arguments, callbacks=[Stop()])
    with pytest.raises(ValueError, match="--resume"):
        train(make_model(), *arguments)
    parts = train(make_model(), *arguments, resume=True)
    assert [row.get("eval_loss") for row in parts["history"]] == [
        row.get("eval_loss") for row in whole["history"]
    ]
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_the_plain_script_does_the_same(tmp_path: Path) -> None:
    """The script of the training guide, on the same data: the same weights as the command's."""
    guide = Path(__file__).parents[2] / "docs" / "guides" / "training.md"
    page = guide.read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    script = next(block for block in blocks if "get_peft_model" in block)
    assert script.count("\n") <= 34
    base, data = save_checkpoint(tmp_path / "base"), tmp_path / "data"
    answers().to_parquet(data / "answers.parquet") if data.mkdir() is None else None
    names = {"Qwen/Qwen3-0.6B": str(base), "./answers": str(data), "./bita": str(tmp_path / "one")}
    for name, real in names.items():
        assert name in script
        script = script.replace(name, real)
    script = script.replace("max_steps=400", "max_steps=4")
    run = forks.run(script, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert cli.main([
        "train", "bita", "--model", str(base), "--data", str(data), "--dtype", "float32",
        "--output", str(tmp_path / "two"), "--max-steps", "4", "--eval-steps", "4",
        "--held-out", "4", "--served-tokens", "8", "--transition-rank", "0",
        "--draft-vocab-size", "0",
    ]) == 0  # fmt: skip
    assert equal(weights(tmp_path / "one"), weights(tmp_path / "two"))


def test_two_processes_give_the_loss_of_one(tmp_path: Path) -> None:
    """gloo, on two halves of each batch: the same training as one process on whole batches."""
    program = """
        from test_train import CONFIG, SETTINGS, answers, make_model
        from hf_spec.training.train import train
        arguments = {"logging_steps": 1}
        settings = {**SETTINGS, "per_device_train_batch_size": size, **arguments}
        train(make_model(), answers(), "bita", output, CONFIG, settings)
    """
    assert_same_history(*run_both(program, tmp_path), rel=1e-4)


def test_resumed_with_another_number_of_processes(tmp_path: Path) -> None:
    """Two processes stop after a checkpoint, one goes on; and the other way round."""
    program = """
        from test_train import CONFIG, SETTINGS, Stop, answers, make_model
        from hf_spec.training.train import train
        arguments = {"logging_steps": 1}
        settings = {**SETTINGS, "per_device_train_batch_size": size, **arguments}
        try:
            train(make_model(), answers(), "bita", output, CONFIG, settings, callbacks=[Stop()])
        except KeyboardInterrupt:
            pass
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    """
    rest = """
        from test_train import CONFIG, SETTINGS, answers, make_model
        from hf_spec.training.train import train
        arguments = {"logging_steps": 1}
        settings = {**SETTINGS, "per_device_train_batch_size": size, **arguments}
        begun = output.with_name(f"rest-{output.name}")  # by the other number of processes
        train(make_model(), answers(), "bita", begun, CONFIG, settings, resume=True)
    """
    arguments = {"logging_steps": 1}
    settings = {**SETTINGS, **arguments}
    train(make_model(), answers(), "bita", tmp_path / "whole", CONFIG, settings)
    one, two = run_both(program, tmp_path)
    shutil.copytree(two, tmp_path / "rest-one")
    shutil.copytree(one, tmp_path / "rest-two")
    run_both(rest, tmp_path)
    for resumed in (tmp_path / "rest-one", tmp_path / "rest-two"):
        assert_same_history(tmp_path / "whole", resumed, rel=1e-4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    ],
    ids=["checkpointing", "accumulation"],
)
def test_trainer_features_do_not_change_what_is_learned(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    settings = {**SETTINGS, "max_steps": 3}
    train(make_model(), answers(), "bita", tmp_path / "a", CONFIG, settings)
    other = {**settings, **arguments}
    train(make_model(), answers(), "bita", tmp_path / "b", CONFIG, other)
    one, two = weights(tmp_path / "a"), weights(tmp_path / "b")
    for name, value in one.items():
        # Means over two halves round differently; Adam's first steps amplify the last digits.
        torch.testing.assert_close(value, two[name], rtol=0.02, atol=2e-4)


def test_mixed_precision_and_tensorboard(tmp_path: Path) -> None:
    arguments = {
        "bf16": True, "report_to": "tensorboard", "logging_dir": str(tmp_path / "logs"),
    }  # fmt: skip
    arguments.pop("logging_dir")
    settings = {**SETTINGS, "max_steps": 3, **arguments}
    record = train(make_model(), answers(), "bita", tmp_path / "out", CONFIG, settings)
    assert record["best"]["eval_tau"] >= 1.0
    assert list((tmp_path / "out" / "checkpoints").rglob("events.out.tfevents.*"))


def test_a_base_in_bf16_trains_weights_in_fp32(tmp_path: Path) -> None:
    model = make_model().to(torch.bfloat16)
    train(model, answers(), "bita", tmp_path, CONFIG, SETTINGS)
    kinds = {value.dtype for value in weights(tmp_path).values()}
    assert kinds == {torch.float32, torch.int64}  # the latter are tokens
    model.load_adapter(tmp_path)
    ids = torch.tensor([answers()[0]["prompt_ids"]])
    model.generate(ids, max_new_tokens=8, **drafting("bita"), do_sample=False)


@pytest.mark.parametrize(
    ("method", "fields", "tokens"),
    [
        ("bita", {}, [*range(65)]),  # a quarter; the first ones where there are no more
        ("medusa", {"draft_vocab_size": 6}, [0, 1, 4, 5, 6, 7]),
        ("ppd", {"draft_vocab_size": 0}, []),
        ("medusa", {"projection": "own"}, []),
        ("ppd", {"head": "vocabulary"}, []),
    ],
)
def test_the_commonest_tokens_are_predicted(
    tmp_path: Path, method: str, fields: dict[str, Any], tokens: list[int]
) -> None:
    settings = {**SETTINGS, "max_steps": 2, "eval_steps": 2}
    record = train(make_model(), answers(), method, tmp_path, fields, settings)
    stored = [value for name, value in weights(tmp_path).items() if "draft_vocabulary" in name]
    assert record["config"]["draft_vocab_size"] == len(tokens)
    assert [one.tolist() for one in stored] == ([tokens] if tokens else [])


# -- refused -----------------------------------------------------------------------------------


def test_fields_of_the_config_are_options() -> None:
    assert set(config_fields(get_method("bita"))) == {
        "num_mask_tokens", "num_prompt_tokens", "prompt_depth", "transition_rank", "root_rank",
        "transition_learning_rate", "draft_vocab_size",
    }  # fmt: skip
    assert "bita" in trainable() and "prompt_lookup" not in trainable()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompt_lookup"], "nothing to train; choose one of bita, layer_skip"),
        (["bitta"], "no method 'bitta' to train; choose one of bita, layer_skip"),
        (["bita", "--num-mask-token", "3"], "no option '--num-mask-token'.*--num-mask-tokens"),
        (["bita", "--num-mask-tokens"], "needs a value"),
        (["bita", "--num-mask-tokens", "none"], "num_mask_tokens='none'"),
        (["bita", "--prompt-depth=medium"], "prompt_depth='medium'"),
        (["bita", "--strategy-kwargs", "{"], "--strategy-kwargs: not JSON"),
        (["bita", "--strategy-kwargs", '{"top": 1}'], "no option 'top'"),
        (["bita", "--max-steps", "many"], "'hf-spec train bita': argument --max_steps.*'many'"),
        (["bita", "--held-out", "0"], "held_out=0: must be a whole number of at least 1"),
        (["bita", "--adapter", "/none"], "cannot read '/none/generation_config.json'"),
    ],
)
def test_bad_input_is_told_before_anything_is_loaded(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    needed = ["--model", "/none", "--data", "/none", "--output", str(tmp_path / "out")]
    assert cli.main(["train", arguments[0], *needed, *arguments[1:]]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_options_are_fields_of_training_arguments() -> None:
    words = "--max-steps 4 --learning_rate=1e-3 --bf16 --report-to tensorboard --held-out 2 "
    words += '--lr-scheduler-kwargs {"num_cycles":1} --num-anchors 3 --num-mask-tokens 4'
    config, rest = take_fields(words.split(), config_fields(get_method("bita")))
    given = parse_arguments(rest, "bita", {})
    assert config == {"num_mask_tokens": 4}
    assert given == {
        "max_steps": 4, "learning_rate": 1e-3, "bf16": True, "report_to": "tensorboard",
        "held_out": 2, "lr_scheduler_kwargs": '{"num_cycles":1}', "num_anchors": 3,
    }  # fmt: skip
    made = spec_arguments(get_method("bita"), Path("out"), hf_spec.BitaConfig(), **given)
    assert made.lr_scheduler_kwargs == {"num_cycles": 1} and made.num_train_epochs == 8
    assert (made.save_steps, made.per_device_eval_batch_size) == (100, 8)
    with pytest.raises(ValueError, match="epochs: no field of transformers.TrainingArguments"):
        spec_arguments(get_method("bita"), Path("out"), hf_spec.BitaConfig(), epochs=3)


def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    needed = ["--model", "/none", "--data", str(tmp_path), "--output", str(tmp_path / "out")]
    assert cli.main(["train", "bita", *needed]) == 2
    assert "pip install 'hf_spec[train]'" in capsys.readouterr().err


def test_fields_are_listed_with_one_default_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "bita", "--list-fields"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(config_fields(get_method("bita"))) + len(own_arguments())
    assert all(line.lower().count("default") == 1 for line in lines)
    assert len({len(line) - len(line.partition("  ")[2].lstrip()) for line in lines}) == 1


def test_missing_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "bita", "--model", "M"]) == 2
    assert capsys.readouterr().err == "hf-spec: 'hf-spec train bita' needs --data, --output\n"


def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "rows.jsonl").write_text('{"prompt_ids": [5, 6], "answer_ids": [7]}\n' * 3)
    monkeypatch.setattr("hf_spec.cli.train.load_model", lambda *_: (None, None))
    monkeypatch.setattr("hf_spec.training.train.train", interrupt)
    folders = ["--data", str(tmp_path), "--output", str(tmp_path / "out")]
    assert cli.main(["train", "bita", "--model", "M", *folders]) == 130
    error = capsys.readouterr().err
    assert "interrupted; the same command with --resume" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("rows", "held_out", "kept"), [(24, 32, 6), (24, 4, 4), (24, 24, 6), (2, 32, 1), (7, 1, 1)]
)
def test_a_quarter_is_held_out_at_most(rows: int, held_out: int, kept: int) -> None:
    data = Dataset.from_dict({"row": list(range(rows))})
    rest, held = split(data, held_out)
    assert len(held) == kept and sorted([*rest["row"], *held["row"]]) == data["row"][:]


def test_one_answer_is_too_few() -> None:
    with pytest.raises(ValueError, match="the data has 1 row: training needs at least 2"):
        split(answers().select([0]), 32)


def test_sequences_cut_before_their_answers(caplog: pytest.LogCaptureFixture) -> None:
    rows = Dataset.from_dict({"prompt_ids": [[5] * 6, [5] * 2], "answer_ids": [[7] * 3] * 2})
    check_lengths(rows, 8)
    assert not caplog.records
    check_lengths(rows, 7)
    assert "in 1 of 2 sequences the first max_length=7 tokens" in caplog.text
    with pytest.raises(ValueError, match="in 2 of 2 sequences the first max_length=3.*raise it"):
        check_lengths(rows, 3)
