"""What :mod:`gpu` measures, row by row: calls and their steps, launches and waits, forwards."""

from __future__ import annotations

import copy
import gc
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from gpu_attention import layer, microseconds
from gpu_checks import check
from gpu_model import TRANSFORMERS, Cell, Row, Subject, Way, What, compiling
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import StoppingCriteria

import hf_spec
from hf_spec.cache.tree_cache import TreeCache, take_over
from hf_spec.core.stats import PHASES, synchronize
from hf_spec.core.tree import Tree
from hf_spec.decoding.step import Steps
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.target.compiled import CompiledTarget
from hf_spec.target.graphs import Graphs
from hf_spec.target.target import Target
from hf_spec.threads import memory
from hf_spec.tools.bench.environment import environment_of
from hf_spec.tools.bench.runner import MOST_COMPILING

#: New tokens of a call whose launches are counted.
COUNTED = 12


class Ticks(StoppingCriteria):
    """Notes when Transformers' generation ends its steps, where it waits for the device anyway."""

    def __init__(self, ids: Tensor):
        self.marks: list[float] = []
        self.nobody = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        synchronize(self.nobody.device)
        self.marks.append(time.perf_counter())
        return self.nobody


@contextmanager
def recorded() -> Iterator[list[Row]]:
    """For the block, what each step of a strategy took, and whether it made code."""
    found, stock = list[Row](), Steps.take

    def take(steps: Steps) -> None:
        before, prepared = copy.copy(steps.state.stats), steps.state.target.prepared
        stock(steps)
        after = steps.state.stats
        row = {"end": time.perf_counter(), "made": steps.state.target.prepared > prepared}
        row["seconds"] = after.total_seconds - before.total_seconds
        row |= {
            name: getattr(after, f"{name}_seconds") - getattr(before, f"{name}_seconds")
            for name in PHASES
        }
        found.append(row)

    with patch.object(Steps, "take", take):
        yield found


def free_memory() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_speed(device: torch.device) -> float:
    """GB/s that a copy reads and writes, the fastest of several."""
    size = 2**31 if device.type == "cuda" else 2**26
    a, b = (torch.zeros(size, dtype=torch.int8, device=device) for _ in "ab")
    found = []
    for _ in range(8):
        synchronize(device)
        start = time.perf_counter()
        b.copy_(a)
        synchronize(device)
        found.append(time.perf_counter() - start)
    return 2 * size / min(found) / 1e9


def phases(steps: Sequence[Row]) -> Row:
    """Milliseconds of each part of a step."""
    parts = {name: sum(step[name] for step in steps) for name in PHASES}
    parts["other"] = sum(step["seconds"] for step in steps) - sum(parts.values())
    return {f"{name}_ms": 1e3 * part / len(steps) for name, part in parts.items()}


class Worker:
    """Measures these cells of a command line, one after the other."""

    def __init__(self, args: Any, cells: Sequence[Cell]):
        self.args, self.device = args, args.device
        self.cuda = self.device.type == "cuda"
        self.bandwidth = copy_speed(self.device)
        self.subject = Subject(args, cells)
        self.model = self.subject.model
        self.read_bytes = sum(  # weights that a step reads
            weight.nbytes for name, weight in self.model.named_parameters()
            if not name.startswith("spec_modules") and "embed_tokens" not in name
        )  # fmt: skip

    def environment(self) -> Row:
        """Where all is measured."""
        return {
            **environment_of(self.model, self.args.model, None), "shape": self.args.shape,
            "copy_gb_per_s": self.bandwidth, "read_bytes": self.read_bytes,
            "parameters": self.model.num_parameters(), "new_tokens": self.args.new_tokens,
            "synthetic_acceptance": self.subject.rates.rates,
        }  # fmt: skip

    def measure(self, cell: Cell) -> Row:
        """A cell's figures."""
        memory(self.model).clear()  # code, buffers, and what was learned
        free_memory()
        if cell.what == What.LAYER:
            return layer(cell, self.device, self.args.dtype, self.args.tune)
        if cell.what == What.CHECK:
            return check(cell.contender, self)
        run = getattr(self, cell.what)
        if cell.contender not in self.subject.synthetic:
            return {**run(cell), "synthetic": False}
        with self.subject.rates.of(self.model):
            return {**run(cell), "synthetic": True}

    def call(self, cell: Cell, inputs: dict[str, Tensor], new: int) -> Row:
        """One call: its tokens and seconds, and those of its steps."""
        given, ids = self.subject.keywords(cell), inputs["input_ids"]
        ours = "assistant_strategy" in given
        ticks, known = Ticks(ids), counters["stats"]["unique_graphs"]
        given |= {} if ours else {"stopping_criteria": [ticks]}
        torch.manual_seed(0)
        synchronize(self.device)
        start = time.perf_counter()
        with recorded() as steps:
            output = self.model.generate(**inputs, **{"do_sample": False, "max_new_tokens": new,
                                                      **given})  # fmt: skip
        synchronize(self.device)
        seconds, tokens = time.perf_counter() - start, output.numel() - ids.numel()
        if ours:
            stats = hf_spec.last_stats(self.model)
            assert stats is not None
            code = stats.details.get("compiled", {})
            made, tau = code.get("made", 0), stats.tau
            usual = [step["end"] for step in steps if not step["made"]]
            refused = code.get("refused", [])
        else:
            made, refused = counters["stats"]["unique_graphs"] - known, []
            tau, usual = tokens / len(ids) / len(ticks.marks), ticks.marks[1:]
            steps = [{"seconds": b - a} for a, b in pairwise(ticks.marks)]
        first = (usual[0] if usual else time.perf_counter()) - start
        return {
            "seconds": seconds, "tokens": tokens, "steps": steps, "made": made, "tau": tau,
            "to_usual_step": first, "refused": refused, "rows": len(ids),
        }  # fmt: skip

    def speed(self, cell: Cell) -> Row:
        """Calls until nothing is made any more, of each prompt the last one counts."""
        sets, new = self.subject.prompts(cell), self.args.new_tokens
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        cold, timed = self.call(cell, sets[0], new), list[Row]()
        for inputs in sets:
            for _ in range(MOST_COMPILING):
                found = self.call(cell, inputs, new)
                if not found["made"]:
                    break
            timed.append(found)
        steps = [step for one in timed for step in one["steps"]]
        seconds = sum(one["seconds"] for one in timed)
        usual = statistics.median(step["seconds"] for step in steps)
        gib = torch.cuda.max_memory_allocated() / 2**30 if self.cuda else 0.0
        row = {
            "tokens_per_second": sum(one["tokens"] for one in timed) / seconds,
            "ms": 1e3 * usual, "tau": statistics.fmean(one["tau"] for one in timed),
            "limit_ms": self.limit_ms(cell, sets), "first_call_s": cold["seconds"],
            "to_usual_step_s": cold["to_usual_step"],
            "making_s": max(cold["seconds"] - timed[0]["seconds"], 0.0) if cold["made"] else 0.0,
            "made": cold["made"], "refused": cold["refused"], "peak_gib": gib,
            "prompt_tokens": sets[0]["input_ids"].shape[1],
        }  # fmt: skip
        return {**row, **(phases(steps) if "forward" in steps[0] else {})}

    def limit_ms(self, cell: Cell, sets: Sequence[dict[str, Tensor]]) -> float:
        """What reading the weights and the prompt's keys and values once takes."""
        config = self.model.config
        dim = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
        slots = statistics.fmean(float(one["attention_mask"].sum()) for one in sets)
        states = 2 * config.num_hidden_layers * config.num_key_value_heads * dim * slots
        size = self.read_bytes + states * self.model.dtype.itemsize
        return 1e3 * size / self.bandwidth / 1e9

    # -- what the host does ------------------------------------------------------------------

    def counts(self, cell: Cell) -> Row:
        """Launches, waits and the device's own time, per step; the prompt counts, too."""
        inputs = self.subject.prompts(cell)[0]
        run = partial(self.call, cell, inputs, COUNTED)
        for _ in range(MOST_COMPILING):
            if not run()["made"]:
                break
        if not self.cuda:
            kinds, waits = [ProfilerActivity.CPU], 0
        else:
            kinds, waits = [ProfilerActivity.CPU, ProfilerActivity.CUDA], self._waits(run)
        with profile(activities=kinds) as seen:
            found = run()
        steps, events = len(found["steps"]) + 1, seen.key_averages()
        on_gpu = [one for one in events if str(one.device_type).endswith("CUDA")]
        by_name = {
            "launches": ("cudaLaunchKernel", "cuLaunchKernel"), "graphs": ("cudaGraphLaunch",),
            "operations": ("aten::",),
        }  # fmt: skip
        row = {
            name: sum(one.count for one in events if one.key.startswith(starts)) / steps
            for name, starts in by_name.items()
        }
        gpu = sum(one.self_device_time_total for one in on_gpu) / 1e3 / steps
        return {**row, "waits": waits / steps, "gpu_ms": gpu}

    def _waits(self, run: Any) -> int:
        """How often PyTorch waits for the device; explicit synchronizations do not count."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("called a synchronizing" in str(one.message) for one in caught)

    @torch.no_grad()
    def forward(self, cell: Cell) -> Row:
        """The tree forward over chains of so many tokens."""
        inputs = self.subject.prompts(cell)[0]
        self.subject.keywords(cell._replace(contender=TRANSFORMERS))
        past = self.model(**inputs, use_cache=True, logits_to_keep=1).get(CACHE)
        batch, context = inputs["input_ids"].shape
        cache = TreeCache(len(past.layers), batch, self.device)
        take_over(cache, past, more=cell.tokens)
        last = torch.full((batch,), context + cell.tokens, device=self.device)
        kind = Target
        if cell.way != Way.EAGER:
            config = compiling(cell.way, self.device)
            kind = partial(CompiledTarget, graphs=Graphs(self.model, config, "L(n)"))  # type: ignore[assignment]
        target = kind(self.model, cache, last)
        tree = Tree.chain(inputs["input_ids"][:, :1].expand(-1, cell.tokens).contiguous())

        def run() -> None:
            target(tree)
            cache.rollback()

        ms = microseconds(run, self.device) / 1e3
        return {"ms": ms, "limit_ms": self.limit_ms(cell, [inputs]), "prompt_tokens": context}
