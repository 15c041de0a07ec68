"""Two processes that call a model together: once with a copy each, once with a half each."""

import copy
import json
import os
import random
import socket
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from conftest import prompt, shared
from covering import EVERY_CASE
from random_mtp import read_or_random
from replay import RECORDED, Replay, Rerun
from running import CAPTURED, needed
from transformers import AutoModelForCausalLM

import hf_spec
from hf_spec.methods import mtp
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.fingerprint import fingerprint
from hf_spec.target import captures, recording
from hf_spec.target.recording import CallFacts, Recording

NEW = 16
OPTIONS = {"layer_skip": {"skip_attention": [1], "skip_mlp": [2]}}
#: One whose policy chooses by time alone, one with probes, one that grows levels by their worth.
NAMES = list(methods()) if os.environ.get(EVERY_CASE) else ["eagle3", "ppd", "prompt_lookup"]


def worker(rank: int, folder: str, port: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found = {"whole": whole(rank), "replica": replica(rank), "halves": halves(rank, folder)}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def whole(rank: int) -> dict[str, Any]:
    """With ``synced_gpus``, as sharded models (FSDP, ZeRO-3) need: one rank has more to do."""
    model, rows = shared("llama"), []
    ids = torch.tensor([[5, 9, 7, 11, 5, 9], [8, 3, 8, 3, 8, 3], [4, 6, 12, 4, 6, 12]])
    settings = {"max_new_tokens": 5 if rank else 30, "do_sample": False}
    free = model.generate(ids, **settings)
    settings["eos_token_id"] = [int(free[0, 8]), int(free[1, 10])]  # rows finish in their own time
    plain = model.generate(ids, **settings)
    hook = model.register_forward_hook(
        lambda module, args, kwargs, output: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    ours = {"assistant_strategy": "prompt_lookup", "synced_gpus": True}
    out = model.generate(ids, **settings, **ours)
    hook.remove()
    steps = hf_spec.last_stats(model).num_steps
    return {"equal": torch.equal(plain, out), "rows": rows, "steps": steps}


def replica(rank: int) -> dict[str, Any]:
    """A model of each rank's own, as in data parallelism, whose steps are recorded; on the second
    rank that fails."""

    class Fails(Replay):
        def record(self, function: Any, inputs: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model, spec = shared("llama"), {"assistant_strategy": "prompt_lookup"}
    plain = outputs(model, {}, seeds=0)
    captures.RECORDERS["cpu"] = Fails if rank else Replay
    hf_spec.record(model)
    with warnings.catch_warnings(action="ignore"):
        equal = [outputs(model, spec, seeds=0) == plain for _ in range(2)]
    details = hf_spec.last_stats(model).details["compiled"]
    hf_spec.record(model, False)
    # By default such a process records nothing: nobody has tried it on several GPUs.
    recording.RECORD_BY_DEFAULT = True
    why = Recording.of(copy.deepcopy(model), CallFacts(fingerprint(model))).why
    recording.RECORD_BY_DEFAULT = False
    return {"equal": equal, "runs": details["runs"], "refused": details["refused"], "why": why}


def halves(rank: int, folder: str) -> dict[str, Any]:
    """Tensor parallelism. The second process has a clock that jumps and another seed: whatever
    depended on them would give its forwards another shape, and the collectives between the layers
    would fail or wait for ever."""
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.eval()
    found = {"plain": outputs(model, {}, seeds=0)}
    if rank == 1:
        now, jumps = time.perf_counter, random.Random(0)
        time.perf_counter = lambda: now() + jumps.random()  # type: ignore[assignment]
    captures.RECORDERS["cpu"] = Rerun
    with warnings.catch_warnings(action="ignore"):
        for name, way in (("recorded", RECORDED), ("compiled", CAPTURED)):
            found[name] = outputs(model, {"assistant_strategy": "prompt_lookup", **way}, seeds=0)
    found["refused"] = hf_spec.last_stats(model).details["compiled"]["refused"]
    mtp._read = read_or_random(mtp._read)  # in a process of its own
    for name in NAMES:
        method = methods()[name]
        if method.needs_adapter:
            torch.manual_seed(2)
            model.add_adapter(method.adapter_config(), name)
        ours = {"assistant_strategy": name, "assistant_kwargs": OPTIONS.get(name, {})}
        ours |= needed(name)
        found[name] = outputs(model, ours, seeds=100 * rank)
        if method.needs_adapter:
            model.delete_adapter(name)
    return found


def outputs(model: Any, ours: dict[str, Any], seeds: int) -> list[list[int]]:
    """The greedy continuation of a prompt, and a sampled one of another."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 61, (2, 1, 5), generator=generator).repeat(1, 1, 2)
    found = []
    for ids, settings in zip(prompts, ({"do_sample": False}, {"temperature": 0.7})):
        torch.manual_seed(seeds)
        out = model.generate(ids, **{"max_new_tokens": NEW, "do_sample": True, **settings}, **ours)
        found.append(out[0].tolist())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    folder = tmp_path_factory.mktemp("ranks")
    shared("llama").save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forks.ranks(worker, str(folder), port)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_decide_alike(found: list[dict[str, Any]], name: str) -> None:
    first, second = (one["halves"] for one in found)
    assert first[name] == second[name]
    assert first[name] == first["plain"]


def test_replicas_record_each_for_itself(found: list[dict[str, Any]]) -> None:
    """One that cannot runs eager steps; nobody waits for it."""
    first, second = (one["replica"] for one in found)
    assert first["equal"] == second["equal"] == [True, True]
    assert first["runs"] and not first["refused"]
    assert not second["runs"] and "out of memory" in str(second["refused"])
    assert first["why"] == second["why"] == "the process is one of several ranks"


def test_ranks_make_no_code(found: list[dict[str, Any]]) -> None:
    """Which one of them might have to make again, or might fail to make."""
    for one in (rank["halves"] for rank in found):
        assert one["recorded"] == one["compiled"] == one["plain"]
        assert one["refused"] == [
            "its weights are split among processes, all of which would have to make the same code"
        ]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("way", "named"),
    [(RECORDED, r"CompileConfig\(backend='cudagraphs'\)"), (CAPTURED, "cache_implementation='s")],
)
def test_ranks_with_prompts_of_their_own_make_no_code(way: Any, named: str) -> None:
    with pytest.raises(ValueError, match=rf"synced_gpus=True .* with .*{named}.* Leave out"):
        shared("llama").generate(
            prompt(), assistant_strategy="prompt_lookup", synced_gpus=True, **way
        )


def test_ranks_that_finish_early_keep_calling_the_model(found: list[dict[str, Any]]) -> None:
    more, less = (one["whole"] for one in found)
    assert more["equal"] and less["equal"]
    assert len(more["rows"]) == len(less["rows"]), "a rank that calls less leaves the other waiting"
    assert less["steps"] < more["steps"], "the extra calls are no steps"
    assert min(more["rows"]) < 3, "a rank's batch may shrink meanwhile"
