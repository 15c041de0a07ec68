"""Training in two processes on the CPU: copies of the model, shards (FSDP2), DeepSpeed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from running import drafting
from tiny_checkpoint import make_model, save_checkpoint
from trained import SETTINGS, TRAININGS, answers, as_options, history, record, same, weights

import hf_spec
from hf_spec.tools.training import trainer
from hf_spec.tools.training.train import train

#: As ``accelerate launch`` passes on its configuration.
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
SHARDED: dict[str, Any] = {
    **SETTINGS, "max_steps": 24, "eval_steps": 8, "learning_rate": 3e-2, "logging_steps": 1
}  # fmt: skip


def test_weights_are_sharded_again_after_an_error(monkeypatch):
    done: list[str] = []

    class Sharded:
        def unshard(self) -> None:
            done.append("whole")

        def reshard(self) -> None:
            done.append("sharded")

    monkeypatch.setattr(trainer, "FSDPModule", Sharded)
    with pytest.raises(KeyError), trainer.whole_root(Sharded()):
        raise KeyError
    assert done == ["whole", "sharded"]


def in_two(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in two processes, as ``torchrun`` starts them, with gloo."""
    with tempfile.TemporaryDirectory() as folder:
        forks.ranks(_rank, f"file://{folder}/store", function, *arguments)


def _rank(rank: int, store: str, function: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", store, rank=rank, world_size=2)
    function(*arguments)
    dist.destroy_process_group()


def assert_same_history(one: Path, two: Path, rel: float, batches: bool = False) -> None:
    """Losses and figures of decoding agree; sums in another order round differently in fp32.

    Args:
        batches: whether prompts were decoded in batches of another size, whose trees may differ.
    """
    for key in ("loss", "eval_loss", "eval_top1_1" if batches else "eval_tau"):
        first, second = history(one, key), history(two, key)
        assert len(first) > 1 and first == pytest.approx(second, rel=rel), key


def own_answers(model: Any) -> Dataset:
    """What the model says, so that learned drafts are accepted."""
    prompts = torch.tensor(answers()["prompt_ids"])
    ids = model.generate(prompts, max_new_tokens=24, do_sample=False, eos_token_id=None)
    rows = zip(prompts.tolist(), ids[:, prompts.shape[1] :].tolist())
    return Dataset.from_list([{"prompt_ids": prompt, "answer_ids": ids} for prompt, ids in rows])


def train_all(output: Path, names: Iterable[str], size: int) -> None:
    """Train with ``size`` sequences per process."""
    settings = {**SETTINGS, "per_device_train_batch_size": size, "logging_steps": 1}
    for name in names:
        method, config = TRAININGS[name]
        train(make_model(), answers(), method, output / name, config, settings)


@pytest.mark.environment
def test_two_processes_give_the_loss_of_one(tmp_path):
    """On two halves of each batch: the same training as one process on whole batches."""
    names = ("bita", "space", "lora", "full", "layer_skip")
    train_all(tmp_path / "one", names, 4)
    in_two(train_all, tmp_path / "two", names, 2)
    for name in names:
        one, two = tmp_path / "one" / name, tmp_path / "two" / name
        assert_same_history(one, two, rel=1e-3, batches=True)


def shard_on_cpus() -> None:
    """accelerate shards over accelerators only; torch does over CPUs, too."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    init = AcceleratorState.__init__

    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = __init__


def train_sharded(folder: Path) -> None:
    os.environ.update(FSDP)
    shard_on_cpus()
    settings = {**SHARDED, "per_device_train_batch_size": 2}
    model = make_model()
    rows = own_answers(model)
    train(model, rows, "bita", folder / "two", arguments=settings)
    dist.barrier()
    if dist.get_rank() == 0:  # as if it had been killed on its way to the last checkpoint
        shutil.copytree(folder / "two", folder / "resumed")
        shutil.rmtree(folder / "resumed" / "checkpoints" / "checkpoint-24")
    dist.barrier()
    train(make_model(), rows, "bita", folder / "resumed", arguments=settings, resume=True)
    os.environ["FSDP_VERSION"] = "1"
    with pytest.raises(ValueError, match="FSDP of version 1.*launch it with --fsdp_version 2"):
        train(make_model(), rows, "bita", folder / "first", arguments=settings)


@pytest.mark.environment
def test_two_processes_with_shards_give_the_loss_of_one(tmp_path):
    """What they write is an adapter like any other; one that was resumed is the same."""
    in_two(train_sharded, tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    model = make_model()
    train(model, own_answers(model), "bita", one, arguments=SHARDED)
    assert_same_history(one, two, rel=1e-5)
    taus = {
        entry["step"]: entry["eval_tau"] for entry in record(two)["history"] if "eval_tau" in entry
    }
    best = max(taus, key=lambda step: taus[step])
    assert taus[best] > 1.1 and len(set(taus.values())) > 1
    assert same(weights(two), weights(two / "checkpoints" / f"checkpoint-{best}"))
    assert same(weights(two), weights(tmp_path / "resumed"))
    assert weights(two).keys() == weights(one).keys()
    model, ids = make_model(), torch.tensor([answers()[0]["prompt_ids"]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(ids, **options)
    model.load_adapter(two)
    assert torch.equal(model.generate(ids, **options, **drafting("bita")), plain)
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


def test_fsdp_that_accelerate_ignores_is_refused(tmp_path, monkeypatch):
    """It would train whole copies of a model that may not fit."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="told to use FSDP, and runs 1 process.* on 'cpu' without"):
        train(make_model(), answers(), "bita", tmp_path, arguments=SHARDED)


def launch(stage: int, *arguments: str) -> None:
    """``hf-spec train`` with the model sharded from its loading on where the stage is 3."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--zero_stage",
        str(stage), "--num_processes", "2", "--main_process_port", "0", "-m", "hf_spec.tools.cli",
        "train", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.environment
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("method", ["bita", "layer_skip"])
def test_two_processes_with_deepspeed_give_the_figures_of_one(tmp_path, stage, method):
    """So does a training that was resumed; embeddings, heads and layers are all read whole."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed, see CONTRIBUTING.md")
    model, checkpoint = make_model(layers=4), save_checkpoint(tmp_path / "model", layers=4)
    rows, data = own_answers(model), tmp_path / "answers.parquet"
    rows.to_parquet(data)
    skipped = {"skip_attention": [1, 2], "skip_mlp": [1, 2], "draft_rank": 4}
    config = skipped if method == "layer_skip" else {}
    settings = {**SHARDED, "max_steps": 9, "eval_steps": 3}
    one, two, resumed = (tmp_path / name for name in ("one", "two", "resumed"))
    train(model, rows, method, one, config, settings)
    options = as_options(
        checkpoint, data, **{**settings, "per_device_train_batch_size": 2}, **config
    )
    launch(stage, method, *options, "--output", str(two))
    assert_same_history(one, two, rel=1e-4)
    shutil.copytree(two, resumed)
    shutil.rmtree(resumed / "checkpoints" / "checkpoint-9")
    launch(stage, method, *options, "--output", str(resumed), "--resume")
    assert same(weights(resumed), weights(two))
    # Gradients are summed in another order, which AdamW's first steps enlarge.
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-3)
