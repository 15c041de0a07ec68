"""Training with parameters sharded over two processes (FSDP2), on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from running import drafting
from tiny_checkpoint import make_model
from trained import SETTINGS, answers, same, weights
from two_processes import assert_same_history

import hf_spec
from hf_spec.training.train import train

METHOD = "bita"
#: As ``accelerate launch`` passes on its configuration.
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def settings(size: int) -> dict[str, Any]:
    enough = {
        "max_steps": 24, "eval_steps": 8, "learning_rate": 5e-2,
        "per_device_train_batch_size": size,
    }  # fmt: skip
    return {**SETTINGS, **enough, "logging_steps": 1}


def own_answers(model: Any) -> Dataset:
    """What the model says, so that learned drafts are accepted."""
    prompts = torch.tensor(answers()["prompt_ids"])
    ids = model.generate(prompts, max_new_tokens=24, do_sample=False, eos_token_id=None)
    rows = zip(prompts.tolist(), ids[:, prompts.shape[1] :].tolist())
    return Dataset.from_list([{"prompt_ids": one, "answer_ids": other} for one, other in rows])


def shard_on_cpus(patch: Callable[..., None]) -> None:
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

    patch(AcceleratorState, "__init__", __init__)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        for name, value in {**FSDP, **place, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, str(value))
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
        shard_on_cpus(monkeypatch.setattr)
        two, resumed = Path(folder, "two"), Path(folder, "resumed")
        model = make_model()
        rows = own_answers(model)
        train(model, rows, METHOD, two, arguments=settings(2))
        dist.barrier()
        if rank == 0:  # as if it had been killed on its way to the last checkpoint
            shutil.copytree(two, resumed)
            shutil.rmtree(resumed / "checkpoints" / "checkpoint-24")
        dist.barrier()
        train(make_model(), rows, METHOD, resumed, arguments=settings(2), resume=True)
        monkeypatch.setenv("FSDP_VERSION", "1")
        with pytest.raises(ValueError, match="FSDP of version 1.*launch it with --fsdp_version 2"):
            train(make_model(), rows, METHOD, Path(folder, "first"), arguments=settings(2))
        dist.destroy_process_group()


@pytest.mark.environment
def test_two_processes_with_shards_give_the_loss_of_one(tmp_path: Path) -> None:
    """What they write is an adapter like any other; one that was resumed is the same."""
    forks.ranks(worker, str(tmp_path))
    one, two = tmp_path / "one", tmp_path / "two"
    model = make_model()
    train(model, own_answers(model), METHOD, one, arguments=settings(4))
    assert_same_history(one, two, rel=1e-5, keys=("loss", "eval_loss", "eval_tau"))
    history = json.loads((two / "training.json").read_text())["history"]
    taus = {row["step"]: row["eval_tau"] for row in history if "eval_tau" in row}
    best = max(taus, key=lambda step: taus[step])
    assert taus[best] > 1.1 and len(set(taus.values())) > 1
    assert same(weights(two), weights(two / "checkpoints" / f"checkpoint-{best}"))
    assert same(weights(two), weights(tmp_path / "resumed"))
    assert weights(two).keys() == weights(one).keys()
    model, ids = make_model(), torch.tensor([answers()[0]["prompt_ids"]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(ids, **options)
    model.load_adapter(two)
    assert torch.equal(model.generate(ids, **options, **drafting(METHOD)), plain)
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


def test_fsdp_that_accelerate_ignores_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train whole copies of a model that may not fit."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="told to use FSDP, and runs 1 process.* on 'cpu' without"):
        train(make_model(), answers(), METHOD, tmp_path, arguments=settings(4))
