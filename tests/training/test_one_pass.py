"""A training without gradients: what is learned in one pass, resumed, gone on with, and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from running import drafting
from tiny_checkpoint import make_model, save_checkpoint
from trained import SETTINGS, Stop, answers, as_options, record, same, weights

import hf_spec
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.methods.registry import methods
from hf_spec.predict.recycling import ORDERS
from hf_spec.target.hidden_states import NUM_READ
from hf_spec.tools import cli
from hf_spec.tools.cli.train import parse_options
from hf_spec.tools.hub import files_to_upload
from hf_spec.tools.training import train as training
from hf_spec.tools.training.arguments import config_fields
from hf_spec.tools.training.dataset import AnswerDataset, collate
from hf_spec.tools.training.train import train

NAME = "token_recycling"
FIT: Any = methods()[NAME].fit
#: Settings of a training without a Trainer.
ONE_PASS = {
    name: SETTINGS[name]
    for name in ("held_out", "served_prompts", "served_tokens", "per_device_train_batch_size")
}


def own_answers(count: int = 10, length: int = 20) -> Any:
    """The tiny model's own answers, to prompts of 3 tokens and more."""
    from datasets import Dataset

    draw, rows = torch.Generator().manual_seed(0), []
    for index in range(count):
        ids = torch.randint(4, 40, (1, 3 + index), generator=draw)
        text = make_model().generate(ids, max_new_tokens=length, do_sample=False)[0].tolist()
        rows.append({"prompt_ids": ids[0].tolist(), "answer_ids": text[ids.shape[1] :]})
    return Dataset.from_list([row for row in rows if len(row["answer_ids"]) > 2])


def tau(folder: Path | None, rows: Any) -> float:
    """Of a model with the adapter, on prompts one by one, each call as if it were the first."""
    model, steps, tokens = make_model(), 0, 0
    if folder is not None:
        model.load_adapter(str(folder))
    for row in rows:
        ids, greedy = torch.tensor([row["prompt_ids"]]), {"max_new_tokens": 20, "do_sample": False}
        plain = model.generate(ids, **greedy)
        spec = drafting(NAME, lookup=False, keep_table=False)
        assert torch.equal(model.generate(ids, **greedy, **spec), plain)
        stats = hf_spec.last_stats(model)
        steps, tokens = steps + stats.num_row_steps, tokens + stats.num_generated_tokens
    return tokens / steps


def table_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name.removeprefix("recycling_"): one for name, one in weights(folder).items()}


def batches_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """The texts that are learned from, in order, and where the answer of each begins."""
    learn, seen = FIT.learn, []

    def seeing(self: Any, given: Any) -> None:
        for ids, labels, there in zip(given.input_ids, given.labels, given.attention_mask):
            seen.append((ids[there > 0].tolist(), int((labels[there > 0] >= 0).nonzero()[0, 0])))
        learn(self, given)

    monkeypatch.setattr(FIT, "learn", seeing)
    return seen


def test_each_context_of_the_answers_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else, with what the model says of the text up to there; that of a context that
    recurs is averaged, the later ones with more weight."""
    rows, model, texts = own_answers(), make_model(), batches_of(monkeypatch)
    made = train(model, rows, NAME, tmp_path, {}, {**ONE_PASS, "held_out": 1})
    held = record(tmp_path)["data"]["held_out"]
    found = table_in(tmp_path)
    known = {}
    entries = zip(found["contexts"].tolist(), found["successors"], found["log_probs"])
    for context, *entry in entries:
        known[tuple(token for token in context if token >= 0)] = entry
    assert len(known) == len(found["contexts"]) and made["trainable_parameters"] == 0
    expected: dict[Any, dict[int, float]] = {}
    for text, first in texts:
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0].log_softmax(-1)
        for end in range(first, len(text)):
            best = logits[end - 1].exp().topk(NUM_READ)
            said = dict(zip(best.indices.tolist(), best.values.tolist()))
            for length in range(1, ORDERS + 1):
                context = tuple(text[end - length : end])
                before = expected.get(context, said)
                mean = {
                    token: (before.get(token, 0) + said.get(token, 0)) / 2
                    for token in {*before, *said}
                }
                kept = sorted(mean, key=mean.__getitem__, reverse=True)[:NUM_READ]
                stored = torch.tensor([mean[token] for token in kept]).log().half().float().exp()
                expected[context] = dict(zip(kept, stored.tolist()))
    assert held == 1 and len(texts) == len(rows) - 1 and known.keys() == expected.keys()
    wrong = set()
    for context, (tokens, log_probs) in known.items():
        chances, real = log_probs.float().exp(), expected[context]
        assert (chances.diff() <= 0).all()
        ours = dict(zip(tokens.tolist(), chances.tolist()))
        least = min(real.values())
        for token in {*ours, *real}:
            if abs(ours.get(token, least) - real.get(token, least)) > 2e-3:
                wrong.add(context)
    # Rounding decides which of two equal tokens is kept, whose later visits then count for more.
    assert len(wrong) < 0.02 * len(known)


def test_questions_between_answers_are_not_entered() -> None:
    """Of a chat all answers are, each behind the tokens before it."""
    model, method = make_model(), methods()[NAME]
    config: Any = method.adapter_config()
    config.check_base(model)
    learner = FIT(model, method.adapter_module.build(config, model))
    row = {
        "prompt_ids": [5, 6, 7, 8, 20, 21, 22, 23], "answer_ids": [9, 10, 11],
        "earlier_answers": [[2, 4]],
    }  # fmt: skip
    learner.learn(TrainingBatch(**collate([AnswerDataset([row])[0]])))
    contexts = learner.adapter().tensors()["contexts"].tolist()
    # Those before 7 and 8, and before 9, 10 and 11.
    ends = [[5, 6], [5, 6, 7], [21, 22, 23], [22, 23, 9], [23, 9, 10]]
    wanted = {tuple(one[-length:]) for one in ends for length in range(1, ORDERS + 1)}
    assert {tuple(token for token in one if token >= 0) for one in contexts} == wanted


def test_answers_make_drafts_of_the_same_prompts_longer(tmp_path: Path) -> None:
    rows = own_answers()
    train(make_model(), rows, NAME, tmp_path, {}, ONE_PASS)
    learned = training.split(rows, ONE_PASS["held_out"])[0]
    before = (tmp_path / "adapter_model.safetensors").read_bytes()
    assert tau(tmp_path, learned) > 1.5 * tau(None, learned)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == before


def test_batches_and_parts_of_texts_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = own_answers()
    for size, at_once in ((1, 256), (4, 256), (4, 7)):
        monkeypatch.setattr("hf_spec.methods.token_recycling.AT_ONCE", at_once)
        settings = {**ONE_PASS, "per_device_train_batch_size": size}
        train(make_model(), rows, NAME, tmp_path / f"{size} {at_once}", {}, settings)
    alone, padded, parts = (table_in(tmp_path / name) for name in ("1 256", "4 256", "4 7"))
    assert torch.equal(alone["contexts"], padded["contexts"])
    assert same(padded, parts)


def stop_at(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    learn, seen = FIT.learn, []

    def stopping(self: Any, given: Any) -> None:
        seen.append(given)
        if len(seen) == batch:
            raise KeyboardInterrupt
        learn(self, given)

    monkeypatch.setattr(FIT, "learn", stopping)


def test_resumed_equals_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**ONE_PASS, "per_device_train_batch_size": 2, "save_steps": 2}
    rows = own_answers(16)
    given = (rows, NAME, tmp_path / "whole", {"table_size": 2000}, settings)
    whole = train(make_model(), *given)
    given = (rows, NAME, tmp_path / "parts", {"table_size": 2000}, settings)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 6)
        train(make_model(), *given)
    kept = [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()]
    assert kept == ["checkpoint-4"]
    with pytest.raises(ValueError, match="--resume"):
        train(make_model(), *given)
    other = (*given[:3], {"table_size": 4000}, settings)
    with pytest.raises(ValueError, match="table_size was 2000, now 4000"):
        train(make_model(), *other, resume=True)
    made = train(make_model(), *given, resume=True)
    assert made["settings"]["steps"] - made["timed_steps"] == 4 and made["best"] == whole["best"]
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert not (tmp_path / "parts" / "checkpoints").exists()


def test_a_table_goes_on_with_other_answers(tmp_path: Path) -> None:
    rows = own_answers(16)
    halves = rows.select(range(8)), rows.select(range(8, len(rows)))
    train(make_model(), halves[0], NAME, tmp_path / "one", {}, ONE_PASS)
    given = (halves[1], NAME, tmp_path / "two", {}, ONE_PASS)
    made = train(make_model(), *given, start=tmp_path / "one")
    assert made["started_from"] == "one"
    one, two = (
        {*map(tuple, table_in(tmp_path / folder)["contexts"].tolist())} for folder in ("one", "two")
    )
    assert one < two
    with pytest.raises(ValueError, match="table_size belongs to what the adapter has learned"):
        train(make_model(), *given[:3], {"table_size": 4000}, ONE_PASS, start=tmp_path / "one")


def test_the_command_with_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record, the card and what is uploaded."""
    checkpoint, data, output = save_checkpoint(tmp_path / "m"), tmp_path / "d", tmp_path / "out"
    data.mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in own_answers(12))
    (data / "answers.jsonl").write_text(rows)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"method: {NAME}\ntable_size: 2000\nheld_out: 2\nserved_tokens: 8\n")
    options = ["--strategy-kwargs", '{"max_depth": 5}', "--output", str(output)]
    command = ["train", "--recipe", str(recipe), *as_options(checkpoint, data), *options]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    made, lines = record(output), printed.out.splitlines()
    assert lines[0].startswith("trained on 10 answers, 2 steps in ")
    first, last = (entry["eval_tau"] for entry in made["history"])
    assert lines[1].startswith(f"tau {last:.2f} on held-out prompts, after 2 steps, {first:.2f} be")
    assert "answers are few" not in printed.err
    assert made["config"] == {"table_size": 2000} and made["settings"]["batch_size"] == 8
    card = (output / "README.md").read_text()
    entries = json.loads((output / "adapter_config.json").read_text())["num_entries"]
    assert f"A table of {entries:,} contexts" in card
    assert "Made in one pass over 10 answers, without gradients" in card
    assert f"Tau on 2 held-out prompts: {last:.2f}; {first:.2f} before." in card
    config = hf_spec.SpecConfig.from_pretrained(output)
    assert (config.assistant_strategy, config.assistant_kwargs) == (NAME, {"max_depth": 5})
    uploaded = files_to_upload(output, "org/table", "org/base")
    assert {"adapter_model.safetensors", "training.json", "README.md"} <= uploaded.keys()


# -- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["learning_rate", "max_steps", "num_anchors", "max_minutes", "optim"]
)
def test_options_of_trainers_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_model: None, name: str
) -> None:
    given = {**SETTINGS, "max_minutes": 3, "optim": "adamw_torch"}[name]
    with pytest.raises(ValueError, match=rf"{name}=.*'{NAME}' learns in one pass.*there are max_l"):
        train(make_model(), answers(), NAME, tmp_path, {}, {**ONE_PASS, name: given})
    word = f"--{name.replace('_', '-')}={given}"
    command = ["train", NAME, *as_options(tmp_path / "m", tmp_path / "d"), word]
    assert cli.main([*command, "--output", str(tmp_path / "out")]) == 2
    assert f"{name}=" in capsys.readouterr().err


def test_what_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (answers(), NAME, tmp_path, {}, ONE_PASS)
    with pytest.raises(ValueError, match=f"callbacks: '{NAME}' is trained without a Trainer"):
        train(make_model(), *arguments, callbacks=[Stop()])
    with pytest.raises(ValueError, match="table_size=3: must be a whole number from 1024"):
        train(make_model(), answers(), NAME, tmp_path, {"table_size": 3}, ONE_PASS)
    monkeypatch.setattr(training.SpecArguments, "world_size", 2)
    with pytest.raises(ValueError, match="2 processes: .* without 'accelerate launch'"):
        train(make_model(), *arguments)
    assert not [*tmp_path.iterdir()]


def test_the_help_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", NAME, "--help"]) == 0
    said = capsys.readouterr().out.partition(f"Options of {NAME}:\n")[2].partition("  Train an")[0]
    listed = [line.split()[0] for line in said.splitlines() if line.startswith("  --")]
    assert listed == [
        "--table-size", "--max-length", "--held-out", "--served-prompts", "--served-tokens"
    ]  # fmt: skip
    fields = config_fields(methods()[NAME])
    assert [*fields] == ["table_size"]
    assert parse_options(["--table-size", "3000"], NAME, fields) == ({"table_size": 3000}, {})
