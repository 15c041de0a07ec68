"""Training end to end on a tiny model: what is learned, kept, resumed, recorded and refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from fake_clock import FakeClock
from running import drafting
from tiny_checkpoint import make_model, save_checkpoint
from trained import (
    SETTINGS,
    TRAININGS,
    Stop,
    answers,
    as_options,
    history,
    record,
    same,
    weights,
)
from transformers import TrainingArguments

import hf_spec
from hf_spec.core.checks import duration
from hf_spec.methods.registry import get_method
from hf_spec.tools import cli
from hf_spec.tools.cli.train import parse_options
from hf_spec.tools.training import split
from hf_spec.tools.training.arguments import (
    SpecArguments,
    added_fields,
    config_fields,
    spec_arguments,
)
from hf_spec.tools.training.train import check_lengths, train
from hf_spec.tools.training.trainer import EvalDecoding, SpecTrainer

METHOD, CONFIG = TRAININGS["bita"]


def test_the_loss_falls(tmp_path):
    model = make_model()
    settings = {**SETTINGS, "max_steps": 30, "eval_steps": 30, "learning_rate": 5e-2}
    settings["logging_steps"] = 5
    made = train(model, answers(), "bita", tmp_path, {**CONFIG, "markov_rank": 128}, settings)
    losses = history(tmp_path, "loss")
    assert losses[-1] < 0.8 * losses[0]
    assert not hasattr(model, "spec_modules")
    markov_head = (1 + 2) * 3 * 32 * 128  # V, S, U for the token before and two distances
    assert made["trainable_parameters"] == 2 * 32 + 2 * 2 * 2 * 4 * 8 + markov_head
    assert record(tmp_path) == json.loads(json.dumps(made))


@pytest.mark.parametrize("name", [name for name in TRAININGS if name != "full"])
def test_the_adapter_that_is_written_is_the_best_one(trained, name):
    folder = trained(name)
    made = record(folder)
    key, choose = ("eval_loss", min) if name == "lora" else ("eval_tau", max)
    found = {row["step"]: row[key] for row in made["history"] if key in row}
    best = made["best"]["step"]
    assert set(found) == {3, 6} and found[best] == choose(found.values())
    assert same(weights(folder), weights(folder / "checkpoints" / f"checkpoint-{best}"))


def test_measured_tau_is_that_of_decoding_each_prompt(trained):
    """Whatever was measured before: the exit's threshold moves, and starts anew."""
    model = make_model()
    prompts = [row["prompt_ids"] for row in answers()][:3]
    decoding = EvalDecoding(prompts, "layer_skip", {"skip_mlp": [1], "draft_exit": "adaptive"}, 10)
    first, threshold = decoding.measure(model), hf_spec.last_stats(model).details["threshold"]
    assert threshold != 0.6, "the threshold has to move"
    assert decoding.measure(model).num_row_steps == first.num_row_steps
    assert hf_spec.last_stats(model).details["threshold"] == threshold

    short = decoding.measure(model, seconds=0.0)
    assert 0 < short.num_generated_tokens < first.num_generated_tokens

    model.load_adapter(trained("bita"))
    prompts = [answers()[row]["prompt_ids"][: 8 - row] for row in range(3)]
    options = {"tree": "efficient", "top_k": 2}
    stats = EvalDecoding(prompts, "bita", options, 10, batch_size=2).measure(model)
    steps = tokens = 0
    for prompt in prompts:
        model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False,
            **drafting("bita", **options),
        )  # fmt: skip
        alone = hf_spec.last_stats(model)
        steps, tokens = steps + alone.num_row_steps, tokens + alone.num_generated_tokens
    assert (stats.num_row_steps, stats.num_generated_tokens) == (steps, tokens)


@pytest.mark.parametrize("name", ["bita", "full", "dflash", "eagle3"])  # the last two by Muon
def test_resumed_training_equals_uninterrupted(trained, tmp_path, name):
    whole = trained(name)
    arguments = (answers(), TRAININGS[name][0], tmp_path, TRAININGS[name][1], SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        train(make_model(), *arguments, callbacks=[Stop()])
    with pytest.raises(ValueError, match="--resume"):
        train(make_model(), *arguments)
    made = train(make_model(), *arguments, resume=True)
    assert 0 < made["timed_steps"] < made["settings"]["steps"]
    assert history(tmp_path, "eval_loss") == history(whole, "eval_loss")
    assert same(weights(tmp_path), weights(whole))
    if name == "full":
        files = [folder / "model" / "model.safetensors" for folder in (whole, tmp_path)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_training_of_some_minutes(tmp_path, monkeypatch):
    """The learning rate falls with the time, and a resumed training ends when the whole would."""
    clock = FakeClock()
    monkeypatch.setattr("hf_spec.tools.training.trainer.time", SimpleNamespace(monotonic=clock))
    step = SpecTrainer.training_step

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        clock.now += 6.0
        return step(self, *args, **kwargs)

    monkeypatch.setattr(SpecTrainer, "training_step", slow)
    settings = {**SETTINGS, "max_minutes": 1.0, "logging_steps": 1, "warmup_steps": 0.1}
    del settings["max_steps"]
    arguments = (answers(), "bita", tmp_path, CONFIG, settings)
    with pytest.raises(KeyboardInterrupt):
        train(make_model(), *arguments, callbacks=[Stop()])
    clock.now += 500.0
    made = train(make_model(), *arguments, resume=True)
    rates = history(tmp_path, "learning_rate")
    assert made["settings"]["steps"] == 10 == len(rates)
    peak = rates.index(max(rates))
    assert rates[0] == 0 < rates[-1] < 0.2 * rates[peak] and peak <= 2
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert made["history"][-1]["minutes"] == 1.0 and "eval_tau" in made["history"][-1]


@pytest.mark.parametrize("keeps_best", [True, False])
def test_the_record_says_what_the_written_weights_reach(tmp_path, keeps_best):
    """Those of the last step, where the best checkpoint is not to be loaded."""
    given = {"load_best_model_at_end": keeps_best, "learning_rate": 1e-2, "num_anchors": 4}
    made = train(
        make_model(), answers(), "medusa", tmp_path, {"num_heads": 2}, {**SETTINGS, **given}
    )
    taus = {entry["step"]: entry["eval_tau"] for entry in made["history"] if "eval_tau" in entry}
    assert [*taus] == [3, 6] and taus[3] > taus[6]
    step = made["best"]["step"]
    assert step == (3 if keeps_best else 6) and made["best"]["eval_tau"] == taus[step]
    assert same(weights(tmp_path), weights(tmp_path / "checkpoints" / f"checkpoint-{step}"))


def test_the_plain_script_does_the_same(tmp_path, monkeypatch):
    """The script of the training guide, on the same data: the same weights as the command's."""
    guide = Path(__file__).parents[2] / "docs" / "guides" / "training.md"
    page = guide.read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    script = next(block for block in blocks if "get_peft_model" in block)
    assert script.count("\n") <= 34
    base, data = save_checkpoint(tmp_path / "base"), tmp_path / "data"
    data.mkdir()
    answers().to_parquet(data / "answers.parquet")
    names = {
        "Qwen/Qwen3-0.6B": str(base),
        "./answers": str(data),
        "./medusa": str(tmp_path / "one"),
    }
    for name, real in names.items():
        assert name in script
        script = script.replace(name, real)
    monkeypatch.chdir(tmp_path)
    exec(script.replace("max_steps=400", "max_steps=4"), {})
    options = as_options(base, data, max_steps=4, eval_steps=4, held_out=4, served_tokens=8)
    options += ["--train-sampling-strategy", "random"]
    assert cli.main(["train", "medusa", *options, "--output", str(tmp_path / "two")]) == 0
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))


@pytest.mark.parametrize("name", ["space", "full", "layer_skip"])
def test_trainer_features_do_not_change_what_is_learned(trained, tmp_path, name):
    """Checkpoints of activations, and gradients accumulated over two halves of a batch."""
    method, config = TRAININGS[name]
    features = {
        "gradient_checkpointing": True, "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
    }  # fmt: skip
    train(make_model(), answers(), method, tmp_path, config, {**SETTINGS, **features})
    # Means over two halves round differently; Adam's first steps amplify the last digits.
    expected = history(trained(name), "eval_loss")
    assert history(tmp_path, "eval_loss") == pytest.approx(expected, rel=1e-3)


def test_mixed_precision_and_a_base_in_bf16(tmp_path):
    """Weights are trained and stored in float32."""
    settings = {**SETTINGS, "max_steps": 3, "bf16": True, "report_to": "tensorboard"}
    model = make_model().to(torch.bfloat16)
    made = train(model, answers(), METHOD, tmp_path, CONFIG, settings)
    assert made["best"]["eval_tau"] >= 1.0
    assert list((tmp_path / "checkpoints").rglob("events.out.tfevents.*"))
    kinds = {value.dtype for value in weights(tmp_path).values()}
    assert kinds == {torch.float32, torch.int64}  # the latter are tokens


@pytest.mark.parametrize(
    ("method", "fields", "tokens"),
    [
        ("bita", {}, [*range(65)]),  # a quarter; the first ones where there are no more
        ("medusa", {"draft_vocab_size": 6}, [0, 1, 4, 5, 6, 7]),
        ("ppd", {"draft_vocab_size": 0}, []),
        ("ppd", {"head": "vocabulary"}, []),
    ],
)
def test_the_commonest_tokens_are_predicted(tmp_path, method, fields, tokens):
    settings = {**SETTINGS, "max_steps": 1, "eval_steps": 1}
    made = train(make_model(), answers(), method, tmp_path, fields, settings)
    stored = [value for name, value in weights(tmp_path).items() if "draft_vocabulary" in name]
    assert made["config"]["draft_vocab_size"] == len(tokens)
    assert [one.tolist() for one in stored] == ([tokens] if tokens else [])


def test_the_command_says_what_came_out_and_what_is_next(tmp_path, capsys):
    checkpoint, data, output = save_checkpoint(tmp_path / "m"), tmp_path / "d", tmp_path / "its out"
    data.mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in answers())
    (data / "answers.jsonl").write_text(rows)
    command = ["train", "medusa", *as_options(checkpoint, data, **SETTINGS, num_heads=2)]
    command += ["--output", str(output)]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert f"note: {len(answers())} answers are few." in printed.err
    assert "Without --prompts, 'hf-spec distill' makes 2,000." in printed.err
    lines = printed.out.splitlines()
    told = [line.split(":")[0] for line in lines[:2]]
    assert told == ["step 3 of 6", "step 6 of 6"] and "{" not in "".join(lines)
    assert lines[-2] == f"adapter: {output}"
    assert lines[-1] == f"try: hf-spec bench --model {checkpoint} --adapter '{output}' --by-task"


# -- refused -----------------------------------------------------------------------------------


def test_options_are_fields_of_config_and_training_arguments(capsys):
    fields = config_fields(get_method("bita"))
    assert {"num_mask_tokens", "markov_rank"} <= fields.keys()
    assert not {"base_facts", "num_layers", "peft_type"} & fields.keys()  # recorded, PEFT's own
    words = "--max-steps 4 --learning_rate=1e-3 --bf16 --report-to tensorboard --held-out 2 "
    words += '--lr-scheduler-kwargs {"num_cycles":1} --num-anchors 3 --num-mask-tokens 4'
    config, given = parse_options(words.split(), "bita", fields)
    assert config == {"num_mask_tokens": 4}
    assert given == {
        "max_steps": 4, "learning_rate": 1e-3, "bf16": True, "report_to": "tensorboard",
        "held_out": 2, "lr_scheduler_kwargs": '{"num_cycles":1}', "num_anchors": 3,
    }  # fmt: skip
    made = spec_arguments(get_method("bita"), Path("out"), hf_spec.BitaConfig(), **given)
    assert made.lr_scheduler_kwargs == {"num_cycles": 1} and made.num_train_epochs == 8
    assert (made.save_steps, made.per_device_eval_batch_size) == (100, 8)
    for name in ("eval_strategy", "save_strategy"):  # the other one follows
        made = spec_arguments(
            get_method("bita"), Path("out"), hf_spec.BitaConfig(), **{name: "epoch"}
        )
        assert (made.eval_strategy, made.save_strategy) == ("epoch", "epoch")
    # The method's help lists them, with one default each.
    assert cli.main(["train", "bita", "--help"]) == 0
    said = capsys.readouterr().out.partition("Options of bita:\n")[2]
    listed, _, rest = said.partition("  Train an")
    assert "Examples:" in rest, "the method's options come first"
    own = {**fields, **added_fields(SpecArguments, TrainingArguments)}
    assert [line.split()[0] for line in listed.splitlines() if line.startswith("  --")] == [
        "--" + name.replace("_", "-") for name in own
    ]
    assert listed.lower().count("default") == len(own)
    for words in ("train --help", "train draft_model --help"):
        assert cli.main(words.split()) == 0
        assert "\nOptions of" not in capsys.readouterr().out


def test_the_order_of_the_data_has_a_seed_of_its_own(tmp_path):
    settings = {**SETTINGS, "max_steps": 1, "eval_steps": 1}
    for seed in (1, 2):
        given = {**settings, "data_seed": seed}
        train(make_model(), answers(), "medusa", tmp_path / str(seed), {"num_heads": 2}, given)
    assert not same(weights(tmp_path / "1"), weights(tmp_path / "2"))


def test_a_process_trains_on_one_device(tmp_path, monkeypatch):
    """The one that is asked for, also where there are others."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made = spec_arguments(get_method("bita"), tmp_path, hf_spec.BitaConfig(), use_cpu=False)
    assert (made.n_gpu, made.train_batch_size) == (1, made.per_device_train_batch_size)
    look = Mock(side_effect=ValueError)
    monkeypatch.setattr("hf_spec.tools.training.arguments.spec_arguments", look)
    words = f"train bita --model m --data d --output {tmp_path} --device cpu"
    assert cli.main(words.split()) == 2 and look.call_args.kwargs["use_cpu"]


@pytest.mark.parametrize(("rows", "held_out", "kept"), [(24, 32, 6), (24, 4, 4), (2, 32, 1)])
def test_a_quarter_is_held_out_at_most(rows, held_out, kept):
    data = Dataset.from_dict({"row": list(range(rows))})
    rest, held = split(data, held_out)
    assert len(held) == kept and sorted([*rest["row"], *held["row"]]) == data["row"][:]
    with pytest.raises(ValueError, match="the data has 1 row: training needs at least 2"):
        split(data.select([0]), held_out)


def test_sequences_cut_before_their_answers(caplog):
    rows = Dataset.from_dict({"prompt_ids": [[5] * 6, [5] * 2], "answer_ids": [[7] * 3] * 2})
    check_lengths(rows, 8)
    assert not caplog.records
    check_lengths(rows, 7)
    assert "in 1 of 2 sequences the first max_length=7 tokens" in caplog.text
    with pytest.raises(ValueError, match="in 2 of 2 sequences the first max_length=3.*raise it"):
        check_lengths(rows, 3)
    caplog.clear()
    check_lengths(rows.add_column("earlier_answers", [[[1, 3]], [[0, 1]]]), 3)
    assert "in 1 of 2 sequences" in caplog.text


@pytest.mark.parametrize(
    ("seconds", "words"), [(40, "40 s"), (700, "12 min"), (11_990, "3 h 20 min")]
)
def test_durations(seconds, words):
    assert duration(seconds) == words
