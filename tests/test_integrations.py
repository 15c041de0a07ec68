"""The callback for trainers of TRL, with a trainer that generates as these do."""

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Tiny, prompt
from transformers import GenerationConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_spec.core.stats import SpecStats
from hf_spec.decoding.loop import _keep, last_stats
from hf_spec.draft.rollouts import RolloutHistory
from hf_spec.files import NoRoom
from hf_spec.integrations import TRLCallback


class Rollouts(TrainerCallback):
    """Generates before each step, as a trainer of TRL does."""

    def __init__(self, config: GenerationConfig):
        self.config = config

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        kwargs["model"].generate(prompt(9), generation_config=self.config)

    on_substep_end = on_step_begin  # of the next part


@pytest.fixture
def trainer(fresh: Tiny, tmp_path: Path) -> Any:
    ids, config = prompt(12)[0], GenerationConfig(max_new_tokens=6, use_cache=False)
    config.assistant_strategy = "prompt_lookup"
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, save_strategy="no",
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    made: Any = Trainer(
        fresh("llama"), arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 8,
        callbacks=[Rollouts(config)],
    )  # fmt: skip
    made.generation_config = config
    return made


@pytest.mark.usefixtures("mtp_as_shipped")
@pytest.mark.parametrize(
    ("named", "used"),
    [(None, "token_recycling"), ("auto", "token_recycling"), ("prompt_lookup", "prompt_lookup")],
)
def test_what_is_logged(trainer: Any, named: str | None, used: str) -> None:
    """Of the strategy that rollouts name, or of the one that fits the model."""
    trainer.generation_config.assistant_strategy = named
    trainer.add_callback(TRLCallback(trainer))
    assert trainer.generation_config.use_cache
    trainer.train()
    stats = last_stats(trainer.model)
    assert stats is not None and stats.strategy == used
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 2
    for entry in entries:
        assert entry["rollouts/tau"] >= 1 and 0 < entry["rollouts/time"] < 1
    assert not any("rollouts/tau" in one for one in trainer.state.log_history if "loss" not in one)


def test_all_rollouts_of_a_step_count(trainer: Any) -> None:
    """Several calls of a part of a step, as with tools, too; those of an evaluation don't."""
    callback, logs = TRLCallback(trainer), {"loss": 0.0}

    def call(tokens: int, plain: float) -> None:
        stats = SpecStats(
            "x", num_steps=2, num_row_steps=2, num_generated_tokens=tokens, forward_seconds=1.0,
            plain_seconds=plain,
        )  # fmt: skip
        _keep(trainer.model, stats, [])

    call(200, 1.0)
    callback.on_evaluate()
    call(2, 1.0)
    call(4, 1.0)
    callback.on_substep_end()
    call(6, 4.0)
    callback.on_step_end()
    callback.on_step_end()  # the same rollout is not counted again
    trainer.log(logs)
    assert logs["rollouts/tau"] == 2 and logs["rollouts/speed"] == 2
    trainer.log(again := {"loss": 0.0})
    assert "rollouts/tau" not in again


def test_answers_are_saved_with_checkpoints(trainer: Any, tmp_path: Path) -> None:
    """A training that is resumed begins with those of its checkpoint."""
    trainer.args.save_strategy, trainer.args.save_steps = IntervalStrategy.STEPS, 1
    history = RolloutHistory()
    trainer.add_callback(TRLCallback(trainer, history=history))
    trainer.train()
    trainer.model.generate(prompt(7), generation_config=trainer.generation_config)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    history.save(tmp_path / "resumed")
    resumed = answers(tmp_path / "resumed")
    assert len({prompt for prompt, _ in resumed}) == 1, "prompt(7)'s came after the checkpoint"
    written = answers(tmp_path / "checkpoint-2" / "rollout_history_0.sqlite")
    assert [size for _, size in written] == [size for _, size in resumed] == [24, 24]


def test_a_checkpoint_without_room_for_answers(trainer: Any, caplog: Any, monkeypatch: Any) -> None:
    """Is written without them, and the training goes on."""
    trainer.args.save_strategy, trainer.args.save_steps = IntervalStrategy.STEPS, 1
    trainer.add_callback(TRLCallback(trainer, history=RolloutHistory()))

    def full(*_: Any) -> None:
        raise NoRoom("no space left on device")

    monkeypatch.setattr(RolloutHistory, "save", full)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "rollout_history_0.sqlite was not written (no space left on device)" in caplog.text


def answers(path: Path) -> list[tuple[bytes, int]]:
    """The prompts of a file's answers, and the bytes of their tokens."""
    with closing(sqlite3.connect(path)) as file:
        return file.execute("select prompt, length(tokens) from answers").fetchall()


def test_recording_is_asked_for(trainer: Any) -> None:
    TRLCallback(trainer, record=True)
    assert trainer.generation_config.compile_config.backend == "cudagraphs"


@pytest.mark.parametrize(
    ("case", "expected"),
    [("vllm", "no strategy is used"), ("no config", "Trainer has no generation_config"),
     ("slow", "0.50 of the speed of plain steps: leave the strategy out")],
)  # fmt: skip
def test_warnings(trainer: Any, caplog: Any, case: str, expected: str) -> None:
    if case == "vllm":
        trainer.args = SimpleNamespace(use_vllm=True)
    elif case == "no config":
        del trainer.generation_config
    with caplog.at_level(logging.WARNING):
        callback = TRLCallback(trainer)
        callback._total.merge(SpecStats("x", num_steps=2, forward_seconds=2.0, plain_seconds=1.0))
        assert (expected in caplog.text) == (case != "slow")
        callback.on_train_end()
    assert expected in caplog.text
