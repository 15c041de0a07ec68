"""The callback for trainers of TRL, with a trainer that generates as these do."""

import copy
import logging
import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter_oracle
import forks
import peft
import pytest
import torch
import torch.distributed as dist
from conftest import Tiny, prompt, shared
from fake_clock import FakeClock
from transformers import GenerationConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_spec import integrations
from hf_spec.adapters.loading import find_active, load_unattached, save_unattached
from hf_spec.core.stats import SpecStats
from hf_spec.decoding.loop import _keep, last_stats
from hf_spec.draft.rollouts import RolloutHistory
from hf_spec.files import NoRoom
from hf_spec.integrations import Text, TRLCallback, _Following
from hf_spec.methods.registry import methods


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


# -- A drafter that follows its policy -------------------------------------------------------------


class Noted(Rollouts):
    """Also notes the rollouts and the state of random numbers after each."""

    def __init__(self, config: GenerationConfig):
        super().__init__(config)
        self.seen: list[list[int]] = []
        self.states: list[list[int]] = []

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        model = kwargs["model"].eval()  # dropout would draw for drafts, too
        rows = model.generate(prompt(9, 2), generation_config=self.config)
        model.train()
        self.seen += rows.tolist()
        self.states.append(torch.random.get_rng_state().tolist())

    on_substep_end = on_step_begin


def adapter_in(folder: Path, name: str = "medusa", **fields: Any) -> str:
    """The folder of an adapter of a method for the tiny model."""
    method, model = methods()[name], copy.deepcopy(shared("llama"))
    assert method.adapter_config is not None
    adapter_oracle.added(model, method.adapter_config(**fields), std=0.05)
    save_unattached(find_active(model, str(method.peft_type)), folder)
    return str(folder)


def following(
    folder: Path, spec: dict[str, Any], load: str | None = None, lora: bool = False, **more: Any
) -> Any:
    """A trainer of a policy with dropout, and its rollouts, which sample; ``more`` is given to the
    callback, if there is any."""
    ids, model = prompt(12)[0], copy.deepcopy(shared("llama"))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    if lora:
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    if load is not None:
        model.load_adapter(load)
        model.requires_grad_(True)
        model.spec_modules.requires_grad_(False)
    config = GenerationConfig(max_new_tokens=6, do_sample=True, pad_token_id=0, **spec)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, save_steps=1,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-3,
        save_only_model=True, gradient_accumulation_steps=2,
    )  # fmt: skip
    rollouts = Noted(config)
    made: Any = Trainer(
        model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 8,
        callbacks=[rollouts],
    )  # fmt: skip
    made.generation_config, made.rollouts = config, rollouts
    made.callback = TRLCallback(made, **more)
    made.add_callback(made.callback)
    return made


@pytest.mark.parametrize("how", ["attached", "named", "beside a LoRA"])
def test_a_drafter_learns_beside_its_policy(tmp_path: Path, how: str) -> None:
    """Rollouts, random numbers, the policy and its checkpoints are those of a training without."""
    place = adapter_in(tmp_path / "adapter")
    attached, lora = how == "attached", how == "beside a LoRA"
    named = {} if attached else {"assistant_kwargs": {"adapter": place}}
    spec, load = {"assistant_strategy": "auto", **named}, place if attached else None
    alone = following(tmp_path / "alone", spec, load, lora)
    both = following(tmp_path / "both", spec, load, lora, train_drafter=True, drafter_share=1.0)
    for one in (alone, both):
        torch.manual_seed(0)
        one.train()
    assert both.rollouts.seen == alone.rollouts.seen
    assert both.rollouts.states == alone.rollouts.states
    for (name, one), other in zip(
        both.model.named_parameters(), alone.model.parameters(), strict=True
    ):
        assert one.requires_grad == other.requires_grad, name
        assert torch.equal(one, other) or "spec_modules" in name
    entries = [entry for entry in both.state.log_history if "rollouts/tau" in entry]
    assert len(entries) == 3 and sum(entry["drafter/updates"] for entry in entries) >= 1
    assert entries[0]["drafter/loss"] > 0 and entries[0]["drafter/time"] > 0
    files = [{path.name for path in Path(one.args.output_dir, "checkpoint-1").iterdir()}
             for one in (both, alone)]  # fmt: skip
    assert files[0] - files[1] == {"hf_spec"} and not files[1] - files[0]

    now, start = dict(both.callback._drafter.training.adapter.named_parameters()), place
    folder = Path(both.args.output_dir, "checkpoint-3", "hf_spec", "drafter")
    fresh = copy.deepcopy(shared("llama"))
    saved, before = (load_unattached(fresh, str(one)) for one in (folder, start))
    drafts = find_active(both.model, "MEDUSA", None if attached else place)
    assert drafts is not None
    for name, one in drafts.named_parameters():
        assert torch.equal(one, now[name]) and torch.equal(one, saved.get_parameter(name))
    assert any(not torch.equal(one, before.get_parameter(name)) for name, one in now.items())


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_training_goes_on_with_its_drafter(tmp_path: Path, lora: bool) -> None:
    """And with its policy, also where that is an adapter, too."""
    place = adapter_in(tmp_path / "adapter")
    spec = {"assistant_strategy": "medusa", "assistant_kwargs": {"adapter": place}}
    more = {"train_drafter": True, "drafter_share": 1.0}
    before = following(tmp_path / "out", spec, lora=lora, **more)
    before.train()
    again = following(tmp_path / "out", spec, lora=lora, **more)
    training = again.callback._drafter.training
    training.learn = lambda texts: 0.0
    again.callback._drafter._share = 0.0
    again.args.max_steps, again.args.learning_rate = 4, 0.0
    checkpoint = tmp_path / "out" / "checkpoint-3"
    again.train(resume_from_checkpoint=str(checkpoint))
    for one, other in zip(before.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    saved = load_unattached(shared("llama"), str(checkpoint / integrations.DRAFTER))
    drafts = find_active(again.model, "MEDUSA", place)
    assert drafts is not None
    for name, one in training.adapter.named_parameters():
        assert torch.equal(one, saved.get_parameter(name))
        assert torch.equal(one, drafts.get_parameter(name))


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_time_that_a_drafter_takes(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Is its share of that of the steps, and at most an update more."""
    clock = FakeClock()
    monkeypatch.setattr(integrations.time, "perf_counter", clock)
    taken: list[int] = []

    def learn(texts: list[Text]) -> float:
        clock.now += 2.0
        taken.append(len(texts))
        return 1.0

    made = _Following(SimpleNamespace(learn=learn), ONE_PROCESS, share)  # type: ignore[arg-type]
    made.after_step(100.0)
    assert not taken, "there is nothing to learn from"
    made._left = 0.0
    made.see([ended([5, 6, 7], [8, 9, 3])])
    for step in range(1, 41):
        made.after_step(10.0)
        assert 0 <= 2.0 * len(taken) - share * 10.0 * step < 2.0 + 1e-6
    logged = made.logged(400.0)
    assert logged == {"drafter/updates": len(taken), "drafter/time": len(taken) / 200,
                      "drafter/loss": 1.0}  # fmt: skip
    assert "drafter/loss" not in made.logged(1.0)


def test_what_a_drafter_learns_from() -> None:
    """All rollouts of the step that had some last, in batches of so many tokens; not those to
    images or embeddings."""
    batches: list[list[Text]] = []
    training: Any = SimpleNamespace(learn=lambda texts: batches.append(texts) or 0.0)
    made = _Following(training, ONE_PROCESS, 0.05, [50])
    made.see([ended([3], [4, 5])])
    made.after_step(0.0)
    long = integrations.AT_ONCE // 2
    rollouts = [ended([7, 8], [9, 10]), ended([3, 4], [5]), ended([5] * long, [6, 7, 8])]
    made.see(rollouts[:2])
    made.see(rollouts[2:])  # of another part of the same step
    made.see([ended([3, 50, 4], [5, 6, 7]), ended([], [5, 6, 7])])
    made.after_step(0.0)
    found = [made._batch() for _ in range(6)]
    expected = {(7, 8, 9, 10), (*[5] * long, 6, 7, 8)}
    for first, second in zip(found[::2], found[1::2]):
        assert len(first) == len(second) == 1
        assert {tuple(first[0].tokens), tuple(second[0].tokens)} == expected
    made.see([ended([7, 8], [9, 10 + row]) for row in range(8)])
    assert [len(made._batch()) for _ in range(2)] == [8, 8]


def ended(prompt: list[int], answer: list[int]) -> Any:
    """Sequences of a call that has ended."""
    return SimpleNamespace(prompts=[prompt], answers=[answer])


#: An accelerator of a single process.
ONE_PROCESS = SimpleNamespace(device=torch.device("cpu"), reduce=lambda tensor, reduction: tensor)
SPACE = {"num_mask_tokens": 2, "rank": 2, "markov_rank": 0, "update": "lora"}


@pytest.mark.parametrize(
    ("case", "expected"),
    [("vllm", "rollouts use no strategy"),
     ("no config", "rollouts use no strategy"),
     ("fsdp", "uses fsdp"),
     ("deepspeed", "uses deepspeed"),
     ("prompt_lookup", "'prompt_lookup' has nothing that is trained"),
     ("layer_skip", "'layer_skip' drafts without an adapter"),
     ("space", "adapters of 'space' .*change the policy"),
     ("trainable", "loaded with is_trainable=True"),
     ("propd", "'propd' with drafter='token_recycling'"),
     ("share", "drafter_share"),
     ("rate", "drafter_learning_rate")],
)  # fmt: skip
def test_drafters_that_are_not_trained(
    trainer: Any, tmp_path: Path, case: str, expected: str
) -> None:
    config, more = trainer.generation_config, {"train_drafter": True}
    if case == "vllm":
        trainer.args = SimpleNamespace(use_vllm=True)
    elif case == "no config":
        del trainer.generation_config
    elif case in ("fsdp", "deepspeed"):
        setattr(trainer, f"is_{case}_enabled", True)
    elif case == "space":
        config.assistant_strategy = "space"
        trainer.model.load_adapter(adapter_in(tmp_path / "adapter", "space", **SPACE))
    elif case == "trainable":
        config.assistant_strategy = None
        trainer.model.load_adapter(adapter_in(tmp_path / "adapter"), is_trainable=True)
    elif case == "propd":
        given = {"prune": True, "drafter": "token_recycling"}
        config.assistant_strategy, config.assistant_kwargs = "propd", given
    elif case in ("share", "rate"):
        more |= {"drafter_share": 0.0} if case == "share" else {"drafter_learning_rate": 2.0}
    else:
        config.assistant_strategy = case
    with pytest.raises(ValueError, match=expected):
        TRLCallback(trainer, **more)


def test_a_table_follows_by_itself(trainer: Any, tmp_path: Path) -> None:
    trainer.generation_config.assistant_strategy = "token_recycling"
    callback = TRLCallback(trainer, train_drafter=True)
    trainer.add_callback(callback)
    trainer.train()
    assert not any("drafter/updates" in entry for entry in trainer.state.log_history)
    with pytest.raises(ValueError, match="no drafter is trained"):
        callback.save_drafter(tmp_path / "drafter")


def test_a_drafter_of_two_processes(tmp_path: Path) -> None:
    """Each learns from rollouts of its own; all have the same drafter."""
    place = adapter_in(tmp_path / "adapter")
    with tempfile.TemporaryDirectory() as folder:
        forks.ranks(_rank, f"file://{folder}/store", tmp_path, place)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert found[0]["seen"] != found[1]["seen"]
    assert found[0]["updates"] == found[1]["updates"] >= 1
    own = load_unattached(shared("llama"), place)
    for name, one in found[0]["adapter"].items():
        assert torch.equal(one, found[1]["adapter"][name])
    assert any(not torch.equal(one, own.get_parameter(n)) for n, one in found[0]["adapter"].items())


def _rank(rank: int, store: str, folder: Path, place: str) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", store, rank=rank, world_size=2)
    spec = {"assistant_strategy": "medusa", "assistant_kwargs": {"adapter": place}}
    made = following(folder / "out", spec, train_drafter=True, drafter_share=1.0)
    learn, done = made.callback._drafter.training.learn, []
    made.callback._drafter.training.learn = lambda texts: done.append(1) or learn(texts)
    torch.manual_seed(rank)
    made.train()
    adapter = made.callback._drafter.training.adapter
    state = {name: one.detach() for name, one in adapter.named_parameters()}
    found = {"seen": made.rollouts.seen, "updates": len(done), "adapter": state}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
