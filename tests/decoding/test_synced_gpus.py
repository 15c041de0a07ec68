"""Two processes that must call the model equally often, as sharded models (FSDP, ZeRO-3) need."""

from __future__ import annotations

from pathlib import Path

import forks
import torch
import torch.distributed as dist


def worker(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    from conftest import _build

    import hf_spec

    torch.set_num_threads(1)
    model = _build("llama", "sdpa", torch.float32)
    rows: list[int] = []

    def count(module: object, args: object, kwargs: dict, output: object) -> None:
        rows.append(len(kwargs["input_ids"]))

    ids = torch.tensor([[5, 9, 7, 11, 5, 9], [8, 3, 8, 3, 8, 3], [4, 6, 12, 4, 6, 12]])
    settings = {"max_new_tokens": 5 if rank else 30, "do_sample": False}
    free = model.generate(ids, **settings)
    settings["eos_token_id"] = [int(free[0, 8]), int(free[1, 10])]  # rows finish in their own time
    plain = model.generate(ids, **settings)
    model.register_forward_hook(count, with_kwargs=True)
    ours = model.generate(ids, **settings, assistant_strategy="prompt_lookup", synced_gpus=True)
    torch.save(
        {
            "equal": torch.equal(plain, ours),
            "calls": len(rows),
            "fewest_rows": min(rows),
            "steps": hf_spec.last_stats(model).num_steps,
        },
        f"{folder}/{rank}.pt",
    )
    dist.destroy_process_group()


def test_ranks_that_finish_early_keep_calling_the_model(tmp_path: Path) -> None:
    forks.ranks(worker, str(tmp_path))
    long, short = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert long["equal"] and short["equal"]
    assert long["calls"] == short["calls"], "a rank that calls less often leaves the other waiting"
    assert short["steps"] < long["steps"], "the extra calls are no steps"
    assert long["fewest_rows"] < 3, "a rank's batch may shrink meanwhile"
