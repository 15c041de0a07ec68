"""Two processes that share one model: what one of them chooses, the other chooses, too.

The second process has a clock that jumps and another seed. Whatever depended on them would give its
forwards another shape, and the collectives between the layers would fail or wait for ever.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_spec.methods.registry import methods

PROMPTS, NEW = 3, 16
OPTIONS = {"layer_skip": {"skip_attention": [1], "skip_mlp": [2]}}


def worker(rank: int, folder: str, port: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.eval()
    found = {"plain": outputs(model, {}, seeds=0)}
    if rank == 1:
        now, jumps = time.perf_counter, random.Random(0)
        time.perf_counter = lambda: now() + jumps.random()  # type: ignore[assignment]
    for name, method in methods().items():
        if method.needs_adapter:
            torch.manual_seed(2)
            model.add_adapter(method.adapter_config(), name)
        ours = {"assistant_strategy": name, "assistant_kwargs": OPTIONS.get(name, {})}
        found[name] = outputs(model, ours, seeds=100 * rank)
        if method.needs_adapter:
            model.delete_adapter(name)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def outputs(model: Any, ours: dict[str, Any], seeds: int) -> list[list[int]]:
    """Greedy and sampled continuations of all prompts."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 61, (PROMPTS, 1, 5), generator=generator).repeat(1, 1, 2)
    found = []
    for sampled in (False, True):
        settings = {"do_sample": sampled, "temperature": 0.7 if sampled else None}
        for index, ids in enumerate(prompts):
            torch.manual_seed(seeds + index)
            out = model.generate(ids, max_new_tokens=NEW, **settings, **ours)
            found.append(out[0].tolist())
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=128,
        initializer_range=0.25, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def found(checkpoint: Path) -> list[dict[str, list[list[int]]]]:
    """By rank, what a strategy's name gives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forks.ranks(worker, str(checkpoint), port)
    return [json.loads((checkpoint / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", methods())
def test_ranks_decide_alike(found: list[dict[str, list[list[int]]]], name: str) -> None:
    first, second = found
    assert first[name] == second[name]
    assert first[name] == first["plain"]
