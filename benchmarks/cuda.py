"""Step times on a GPU: ``python benchmarks/cuda.py --shape 1b,8b --output results.json``.

Needs nothing but the package: models are Llamas of random weights, as are adapters, layers for
multi-token prediction and assistant models. Measures

* what a forward over n tokens takes, as the model is and by each backend, beside plain
  Transformers;
* what a step of each strategy takes with a fixed number of candidates. Random weights accept
  nothing worth counting: the speedup at a given tau is tau divided by "/ plain";
* how often a step waits for the device.

On a CPU it runs, too, with the shape ``tiny``.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StoppingCriteria

import hf_spec
from hf_spec.adapters.predicting import TRAINED, PredictingConfig
from hf_spec.cache.convert import take_over
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.checks import first_line
from hf_spec.core.stats import Stopwatch, synchronize
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.files import write_atomically
from hf_spec.methods.mtp import weights as mtp_weights
from hf_spec.methods.registry import get_method, methods
from hf_spec.model.compiled import CompiledTarget
from hf_spec.model.graphs import Graphs
from hf_spec.model.target import Target
from hf_spec.tools.bench.contenders import ours, parse_names
from hf_spec.tools.bench.environment import environment_of
from hf_spec.tools.bench.report import aligned
from hf_spec.tools.bench.results import PHASES
from hf_spec.tools.cli.options import whole_numbers
from modeling_patches.cache_name import CACHE
from modeling_patches.mtp import MtpLayers

#: Hidden size, layers, heads, key-value heads, intermediate size, vocabulary.
SHAPES = {
    "tiny": (64, 4, 4, 2, 128, 512),
    "22m": (384, 12, 6, 2, 1024, 8192),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "8b": (4096, 32, 32, 8, 14336, 128256),
}
#: An assistant model has one in this many of the model's layers.
SMALLER = 8
#: Tokens that prompts consist of and that the model emits: look-ups find what they need.
WORDS = 16
#: Forwards that are not timed: code is made, kernels are chosen, CUDA graphs recorded.
WARM = 4
NOT_HERE = "not on this device"
#: The way without a backend.
UNCOMPILED = "uncompiled"

Row = dict[str, Any]
#: Calls of ``generate`` by the way they run, which give what their steps took.
Calls = dict[str, Callable[[], list[Row]]]


def config_of(shape: str, **fields: int) -> LlamaConfig:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "intermediate_size", "vocab_size")  # fmt: skip
    return LlamaConfig(
        **{**dict(zip(names, SHAPES[shape])), **fields}, max_position_embeddings=2**17,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip


def build(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of random weights that emits one of a few tokens.

    Raises:
        MemoryError: its weights do not fit.
    """
    with torch.device("meta"):
        size = LlamaForCausalLM(config).num_parameters() * dtype.itemsize
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    if size > free:
        raise MemoryError(f"weights of {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        model.lm_head.weight[:WORDS] *= 10
    return model


def random_mtp(model: Any, device: torch.device, dtype: torch.dtype) -> MtpLayers:
    """A layer for multi-token prediction of random weights, which no checkpoint has here."""
    layers = MtpLayers(model, 1, sparse=True)
    layers.layers.to_empty(device=device).to(dtype)
    for weight in layers.layers.parameters():
        torch.nn.init.normal_(weight, std=0.02) if weight.ndim > 1 else torch.nn.init.ones_(weight)
    layers.place(device)
    return layers.requires_grad_(False).eval()


def free_memory() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def spread(seconds: Sequence[float]) -> Row:
    """Median and quartiles in milliseconds."""
    several = seconds if len(seconds) > 1 else [*seconds, *seconds]
    low, median, high = statistics.quantiles(several, n=4, method="inclusive")
    return {"ms": 1e3 * median, "low_ms": 1e3 * low, "high_ms": 1e3 * high, "timed": len(seconds)}


class Bench:
    """One model with one context and batch size.

    Args:
        model: of random weights, without adapters.
        args: of the command line.
    """

    def __init__(self, model: Any, args: argparse.Namespace, context: int, batch: int):
        self.model, self.args, self.device = model, args, model.device
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(WORDS, (batch, context), generator=draw).to(self.device)
        self.static: dict[str, Row] = {}
        for backend in args.backend:
            compiling = CompileConfig(backend=backend, dynamic=False)
            compiling._compile_all_devices = True
            given = {"cache_implementation": "static", "compile_config": compiling}
            self.static[backend] = given

    @torch.no_grad()
    def forwards(self) -> Iterator[Row]:
        """L(n): the tree forward over chains of n tokens."""
        past = self.model(input_ids=self.ids, use_cache=True, logits_to_keep=1).get(CACHE)
        batch, context = self.ids.shape
        most = max(self.args.tokens)
        cache = TreeCache(len(past.layers), batch, self.device)
        take_over(cache, past, more=most)
        last = torch.full((batch,), context + most, device=self.device)
        for way in (UNCOMPILED, *self.static):
            compiling = self.static.get(way, {}).get("compile_config")
            graphs = Graphs(self.model, compiling, "L(n)") if compiling else None
            kind = Target if graphs is None else partial(CompiledTarget, graphs=graphs)
            target = kind(self.model, cache, last)
            for tokens in self.args.tokens:
                made = graphs.made if graphs else 0
                timed = [self._seconds(target, tokens) for _ in range(self.args.repeats + WARM)]
                yield {
                    "way": way, "tokens": tokens, **spread(timed[WARM:]), "slots": cache.capacity,
                    "first_seconds": timed[0], **_graphs(graphs.details() if graphs else {}),
                    "made": graphs.made - made if graphs else 0,
                }  # fmt: skip

    def _seconds(self, target: Target, tokens: int) -> float:
        """Of one forward, from an idle device to an idle device."""
        tree = Tree.chain(self.ids[:, :1].expand(-1, tokens).contiguous())
        synchronize(self.device)
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target(tree)
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            target(tree)
            seconds = time.perf_counter() - start
        target.cache.rollback()
        return seconds

    def plain(self) -> Calls:
        """Plain generation as it is, and with a static cache and the first backend."""
        backend, static = next(iter(self.static.items()))
        return {UNCOMPILED: self._plain, backend: partial(self._plain, **static)}

    def _plain(self, **kwargs: Any) -> list[Row]:
        ticks = Ticks(self.ids)
        self._generate(stopping_criteria=[ticks], **kwargs)
        return [{"seconds": b - a} for a, b in zip(ticks.marks, ticks.marks[1:])]

    def strategy(self, name: str, options: Row, assistant: Any = None) -> Calls:
        """A strategy as it is, and with each backend."""
        spec = ours(name, options)
        if assistant is not None:
            spec["assistant_model"] = assistant

        def call(**kwargs: Any) -> list[Row]:
            with recorded() as steps:
                self._generate(**spec, **kwargs)
            return steps[1:-1]  # without the prefill and what comes behind the last step

        compiled = {way: partial(call, **static) for way, static in self.static.items()}
        return {UNCOMPILED: call, **compiled}

    def _generate(self, **kwargs: Any) -> None:
        self.model.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), do_sample=False,
            max_new_tokens=self.args.new_tokens, **kwargs,
        )  # fmt: skip

    def measure(self, calls: Calls) -> Iterator[Row]:
        """All ways in turns, after calls that compile and warm up."""
        first, steps = dict[str, Row](), {way: list[Row]() for way in calls}
        for way, call in calls.items():
            start = time.perf_counter()
            call()
            first[way] = {"first_seconds": time.perf_counter() - start}
            stats = hf_spec.last_stats(self.model)
            first[way] |= _graphs(stats.details.get("compiled", {}) if stats else {})
            call()
        for _ in range(self.args.calls):
            for way, call in calls.items():
                steps[way] += call()
        for way, found in steps.items():
            row = {"way": way, **spread([step["seconds"] for step in found])}
            if "forward" in found[0]:
                seconds = sum(step["seconds"] for step in found)
                for phase in PHASES:  # of sums: a phase may be booked with a later step
                    row[f"{phase}_share"] = sum(step[phase] for step in found) / seconds
                row["outside_share"] = 1 - row["forward_share"]
                row["drafted"] = statistics.median(step["drafted"] for step in found)
            yield {**row, **first[way], "waits": _waits(self.device, calls[way])}


class Ticks(StoppingCriteria):
    """Notes when plain generation ends its steps, where it waits for the device anyway."""

    def __init__(self, ids: torch.Tensor):
        self.marks: list[float] = []
        self.nobody = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        synchronize(self.nobody.device)
        self.marks.append(time.perf_counter())
        return self.nobody


@contextmanager
def recorded() -> Iterator[list[Row]]:
    """For the block, what each step of a strategy took, in all and by phase."""
    found, stock, drafted = list[Row](), Stopwatch.step, 0

    def step(watch: Stopwatch, last: bool = False) -> float:
        nonlocal drafted
        before = copy.copy(watch.stats)
        row = {"seconds": stock(watch, last), "drafted": before.num_drafted_tokens - drafted}
        drafted = before.num_drafted_tokens
        for phase in PHASES:
            name = f"{phase}_seconds"
            row[phase] = getattr(watch.stats, name) - getattr(before, name)
        found.append(row)
        return row["seconds"]

    with patch.object(Stopwatch, "step", step):
        yield found


def _graphs(details: Row) -> Row:
    return {"made": details.get("made", 0), "refused": details.get("refused", [])}


def _waits(device: torch.device, call: Callable[[], list[Row]]) -> float | str:
    """How often PyTorch waits for the device, per step of a call; its prefill counts, too.

    Explicit synchronizations are not among them.
    """
    if device.type != "cuda":
        return NOT_HERE
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            steps = len(call())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in caught) / steps


def options_of(name: str, candidates: int, layers: int) -> Row:
    """Options under which every step drafts so many tokens."""
    skipped = list(range(1, layers - 1, 2))
    own: dict[str, Row] = {
        "prompt_lookup": {"max_nodes": candidates, "max_depth": candidates, "min_probability": 0.0},
        "layer_skip": {
            "max_draft": candidates, "draft_exit": "fixed", "skip_attention": skipped,
            "skip_mlp": skipped,
        },
        "plain": {},
    }  # fmt: skip
    return {"drafting": "always", **own.get(name, {"num_draft_tokens": candidates})}


def measure(bench: Bench, shape: str, say: Callable[[str], None]) -> dict[str, list[Row]]:
    """Everything of one model, context and batch size."""
    found: dict[str, list[Row]] = {"forward": [], "generate": [], "strategies": []}
    model, args = bench.model, bench.args
    say("generate")
    for row in bench.measure(bench.plain()):
        found["generate"].append({**row, "tokens_per_second": 1e3 * len(bench.ids) / row["ms"]})
    base = found["generate"][1]["ms"]
    for row in bench.forwards():
        say(f"{row['way']} forward over {row['tokens']}: {row['ms']:.2f} ms")
        found["forward"].append({**row, "ratio": row["ms"] / base})
    for name in args.strategies:
        method, assistant = get_method(name), None
        if method.needs_assistant:
            layers = max(model.config.num_hidden_layers // SMALLER, 1)
            small = config_of(shape, num_hidden_layers=layers)
            assistant = build(small, model.device, model.dtype)
        if method.needs_adapter:
            kind: Any = method.adapter_config
            given = TRAINED if issubclass(kind, PredictingConfig) else {}
            model.add_adapter(kind(**given), name)  # as hf-spec train makes them
        for candidates in args.candidates:
            options = options_of(name, candidates, model.config.num_hidden_layers)
            label = {"strategy": name, "candidates": candidates}
            try:
                for row in bench.measure(bench.strategy(name, options, assistant)):
                    say(f"{name}, {candidates} candidates, {row['way']}: {row['ms']:.2f} ms")
                    found["strategies"].append({**label, **row, "ratio": row["ms"] / base})
            except (RuntimeError, ValueError, NotImplementedError) as error:
                say(f"{name}, {candidates} candidates: {first_line(error)}")
                found["strategies"].append({**label, "error": first_line(error)})
        if method.needs_adapter:
            model.delete_adapter(name)
    say("plain once more: how much the machine's speed has changed")
    for before, after in zip(found["generate"], bench.measure(bench.plain())):
        before["later_ms"] = after["ms"]
    return found


def print_results(results: Row) -> None:
    time_of = {"ms (quartiles)": "{ms:.2f} ({low_ms:.2f}-{high_ms:.2f})"}
    ratio = {"/ plain": "{ratio:.2f}"}
    first = {"first call, s": "{first_seconds:.1f}"}
    made = {"graphs": "{made}", **first}
    waits = {} if NOT_HERE in str(results["generate"]) else {"waits": "{waits:.1f}"}
    plain = {"at the end": "{later_ms:.2f}", "tokens/s": "{tokens_per_second:.1f}"}
    shares = {"outside": "{outside_share:.0%}", "draft": "{draft_share:.0%}"}
    for kind, title, word, heads in (
        ("generate", "plain Transformers: steps", "{way}", {**time_of, **plain, **first, **waits}),
        ("forward", "tree forward over n tokens; / plain: by a step of plain, compiled",
         "{tokens} {way}", {**time_of, **ratio, **made, "slots": "{slots}"}),
        ("strategies", "steps of strategies; speedup = tau / (/ plain); outside: of the forward",
         "{strategy} {candidates} {way}", {**time_of, **ratio, **shares, **made, **waits}),
    ):  # fmt: skip
        cells = "{shape}, {context}, {batch}", word, *heads.values()
        rows = [
            [cell.format(**row) for cell in cells] for row in results[kind] if "error" not in row
        ]
        print(f"\n{title}\n{aligned(['shape, context, batch', kind, *heads], rows, 2)}")
    if not waits:
        print(f"waits for the device: {NOT_HERE}")
    for row in [*results["skipped"], *results["forward"], *results["strategies"]]:
        if row.get("reason") or row.get("error") or row.get("refused"):
            print("not measured, or not compiled:", json.dumps(row))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", help=f"of {', '.join(SHAPES)}, with commas; default: 1b on CUDA, else tiny")
    add("--device", default="cuda" if cuda else "cpu", help="default: %(default)s")
    add("--dtype", choices=("bfloat16", "float16", "float32"),
        help="default: bfloat16 on CUDA, else float32")  # fmt: skip
    for name, default, what in (
        ("--contexts", "512,4096", "tokens in the cache before anything is timed"),
        ("--batch-sizes", "1,8", "rows"),
        ("--tokens", "1,2,4,8,16,32,64", "tokens of a forward"),
        ("--candidates", "7,15", "candidates of a strategy's step"),
    ):
        add(name, default=default, help=f"{what} (default: {default})")
    add("--strategies", default=",".join(methods()), help="default: %(default)s; '' for none")
    add("--repeats", type=int, default=20, help="timings of a forward (default: %(default)s)")
    add("--calls", type=int, default=3, help="timed calls of each way (default: %(default)s)")
    add("--new-tokens", type=int, default=64, help="of each call (default: %(default)s)")
    add("--backend", default="inductor,cudagraphs" if cuda else "inductor",
        help="with commas; plain generate takes the first one (default: %(default)s)")  # fmt: skip
    add("--output", type=Path, default=Path("cuda.json"), help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        args.device = torch.device(args.device)
        if args.device.type not in ("cuda", "cpu") or (args.device.type == "cuda" and not cuda):
            raise ValueError(f"--device {args.device}: not here; give cpu or a CUDA device")
        on_gpu = args.device.type == "cuda"
        args.shape = (args.shape or ("1b" if on_gpu else "tiny")).split(",")
        if unknown := set(args.shape) - set(SHAPES):
            raise ValueError(f"--shape {', '.join(unknown)}: choose from {', '.join(SHAPES)}")
        for name in ("contexts", "batch_sizes", "tokens", "candidates"):
            setattr(args, name, whole_numbers(f"--{name.replace('_', '-')}", getattr(args, name)))
        args.dtype = getattr(torch, args.dtype or ("bfloat16" if on_gpu else "float32"))
        for name, least in (("repeats", 2), ("calls", 1), ("new_tokens", 16)):
            if getattr(args, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}")
        args.backend = args.backend.split(",")
        for backend in args.backend:
            if backend not in torch._dynamo.list_backends(exclude_tags=()):
                raise ValueError(f"--backend {backend}: torch.compile does not know it")
        TokenTree.chain(max(args.tokens) - 1)  # refuses too many
        args.strategies = parse_names(args.strategies) if args.strategies else []
        for name in args.strategies:
            for candidates in args.candidates:
                ours(name, options_of(name, candidates, layers=4))
    except (ValueError, RuntimeError) as error:
        parser.error(first_line(error))
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    model: Any = SimpleNamespace(device=args.device, dtype=args.dtype, config=config_of("tiny"))
    settings = {name: getattr(args, name) for name in ("backend", "repeats", "calls", "new_tokens")}
    settings["argv"] = [Path(__file__).name, *(sys.argv[1:] if argv is None else argv)]
    results: Row = {
        "environment": {**environment_of(model, "random Llama", None), **settings},
        "generate": [], "forward": [], "strategies": [], "skipped": [],
    }  # fmt: skip
    for shape, context, batch in product(args.shape, args.contexts, args.batch_sizes):
        label = {"shape": shape, "context": context, "batch": batch}
        begin = ", ".join(f"{name} {value}" for name, value in label.items())
        say = partial(print, f"{begin}:", flush=True)
        try:
            model = build(config_of(shape), args.device, args.dtype)
            with patch.object(mtp_weights, "_read", random_mtp):
                found = measure(Bench(model, args, context, batch), shape, say)
            for kind, rows in found.items():
                results[kind] += [{**label, **row} for row in rows]
        except (MemoryError, torch.OutOfMemoryError) as error:
            say(f"skipped, does not fit: {first_line(error)}")
            results["skipped"].append({**label, "reason": first_line(error)})
        model = None
        free_memory()
        write_atomically(args.output, json.dumps(results, indent=1))
    print_results(results)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
