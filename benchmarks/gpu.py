"""Measures a GPU in eight minutes: ``python benchmarks/gpu.py``.

SmolLM2 and its adapters are widened with zeros to the shape of an 8B Llama (:mod:`wide`): text and
acceptance are a real model's, and a step takes what an 8B takes. ``--model`` takes any other model,
as it is unless there is a ``--shape``, and ``--model random`` needs nothing but the package.
Drafters that are not trained for the model accept at the ``--rates`` given, which the table marks
(see ``hf-spec bench --synthetic-acceptance``).

Rows are measured by one other process, the most valuable first, and written as they come. A row
that takes longer than its limit is given up, as is one that ends the process. The same command goes
on where it was cut off. On a CPU it makes a dry run of every part with the shape ``tiny``.

``--decide`` runs what decides whether steps are recorded by default (:mod:`gpu_checks`), in at most
ten minutes, and says which conditions hold.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, product
from pathlib import Path
from typing import Any

import torch
from gpu_checks import TESTS_SECONDS, decisive, print_verdict
from gpu_model import RANDOM, TRANSFORMERS, Cell, Row, Way, What
from gpu_worker import Worker
from wide import SHAPES

import hf_spec
from hf_spec.core.checks import first_line
from hf_spec.core.stats import synchronize
from hf_spec.files import read_json, write_json
from hf_spec.tools.bench.contenders import STOCK_ASSISTED, STOCK_LOOKUP, SyntheticRates
from hf_spec.tools.bench.results import aligned
from hf_spec.tools.cli.common import whole_numbers

#: Seconds until a process measures, for a row, and for one that compiles.
LOADING, LIMIT, COMPILING = 150.0, 60.0, 400.0
#: What is measured at every size, by the way it runs: the first one counts as 1.
LINEUP = [(TRANSFORMERS, Way.EAGER)]
LINEUP += [(name, Way.RECORDED) for name in ("plain", "medusa", "prompt_lookup", "eagle3")]
#: What is measured with eager steps besides.
EAGER = (STOCK_LOOKUP, "medusa", "plain", "prompt_lookup")
DEMO = Path(hf_spec.__file__).parent / "tools/demo"
#: Tokens of forwards.
TOKENS = (1, 4, 8, 16, 32, 64)
#: Figures of rows by column: their names, and digits.
COLUMNS = {
    "tokens/s": ("tokens_per_second", 1), "tau": ("tau", 2), "ms a step": ("ms", 2),
    "draft": ("draft_ms", 2), "forward": ("forward_ms", 2), "verify": ("verify_ms", 2),
    "other": ("other_ms", 2), "first call, s": ("first_call_s", 1), "making, s": ("making_s", 1),
    "to a usual step, s": ("to_usual_step_s", 1), "peak, GiB": ("peak_gib", 1),
}  # fmt: skip
#: Model, shape, batches, contexts, new tokens and prompts by device.
_DEFAULTS = {
    "cuda": ("HuggingFaceTB/SmolLM2-135M-Instruct", "8b", "1,4,16,64", "512,8192,32768", 64, 3),
    "cpu": (f"{DEMO}/model", "tiny", "1,2", "200,300", 12, 1),
}


def plan(args: argparse.Namespace) -> list[Cell]:
    """All rows, the most valuable first."""
    (short, *longer), cuda = args.contexts, args.device.type == "cuda"
    at: Row = {"context": short}
    everywhere = LINEUP if cuda else LINEUP[:3]

    if args.decide:
        return decisive()

    def rows(ways: Iterable[tuple[str, Way]], **more: Any) -> list[Cell]:
        return [Cell(name, way, **more) for name, way in ways]

    first, eager = rows(LINEUP, **at), rows(product(EAGER, [Way.EAGER]), **at)
    recycling = rows([("token_recycling", Way.RECORDED)], **at)
    if args.adapter:  # untrained ones draft chains, which nothing joins
        recycling += rows([("medusa", Way.RECORDED)], **at, recycle=True)
    batches = [rows(everywhere, batch=batch, context=short) for batch in args.batches if batch > 1]
    contexts = [
        Cell(name, way, context=context, kernel=cuda and name != TRANSFORMERS)
        for context, (name, way) in product(longer, everywhere)
    ]
    contexts += [Cell("medusa", Way.RECORDED, context=context) for context in longer if cuda]
    sampled, beside = rows(LINEUP[:4], **at, temperature=0.7), rows(LINEUP[:3], **at, lora=True)
    with_assistant = rows([("draft_model", Way.RECORDED), (STOCK_ASSISTED, Way.EAGER)], **at)
    with_assistant *= bool(args.assistant or args.shape)
    counted = rows([*LINEUP[:3], ("medusa", Way.EAGER)], **at, what=What.COUNTS)
    forwards = [
        Cell("forward", way, **at, what=What.FORWARD, tokens=count)
        for way, count in product((Way.RECORDED, Way.EAGER), TOKENS)
    ]
    sizes = product(longer, (16, 64), (1, 8)) if cuda else [(short, 16, 1)]
    layers = [
        Cell("attention", what=What.LAYER, context=context, tokens=count, batch=batch)
        for context, count, batch in sizes
        if cuda or "TRITON_INTERPRET" in os.environ
    ]
    compiled = rows(product((TRANSFORMERS, "plain", "medusa"), [Way.COMPILED]), **at)
    found = [
        *first, *recycling, *eager, *compiled[:1], *chain(*batches), *contexts, *sampled, *counted,
        *forwards, *with_assistant, *beside, *layers, *compiled[1:],
    ]  # fmt: skip
    return [cell for cell in found if not args.only or cell.contender in args.only]


def limit_of(cell: Cell) -> float:
    if cell.what == What.CHECK:
        return LIMIT + TESTS_SECONDS * (cell.contender in ("the tests", "the default"))
    return COMPILING if cell.way == Way.COMPILED else LIMIT


def messages(args: argparse.Namespace, cells: Sequence[Cell]) -> Iterator[Row]:
    """Measures cells in this process; says which one begins, and its figures."""
    worker = Worker(args, cells)
    yield {"environment": worker.environment()}
    for cell in cells:
        yield {"begins": cell}
        try:
            yield {"found": worker.measure(cell)}
        except Exception as error:  # a compiler may raise anything
            yield {"found": {"error": first_line(error)}}
            try:
                synchronize(args.device)
            except RuntimeError:  # a process whose GPU has failed can do nothing more
                return


def in_another_process(command: Sequence[str], cells: Sequence[Cell], ends: float) -> Iterator[Row]:
    """:func:`messages` of a process, which ends with this iterator, and when a cell takes longer
    than its limit, or at the time ``ends``, of which only the first is said."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    process.stdin.write(json.dumps(cells))
    process.stdin.close()
    limit, until = LOADING, time.monotonic() + LOADING
    try:
        while True:
            try:
                line = lines.get(timeout=max(min(until, ends) - time.monotonic(), 0.0))
            except queue.Empty:
                if until <= ends:
                    yield {"found": {"error": f"took longer than {limit:.0f} seconds"}}
                return
            if not line:
                process.wait()
                if process.returncode:
                    yield {"found": {"error": f"its process ended with {process.returncode}"}}
                return
            if line.startswith("{"):
                message = json.loads(line)
                if "begins" in message:
                    limit = limit_of(Cell(*message["begins"]))
                    until = time.monotonic() + limit
                yield message
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(
    args: argparse.Namespace, cells: Sequence[Cell],
    source: Callable[[Sequence[Cell], float], Iterator[Row]],
) -> Row:  # fmt: skip
    """Measures all cells that the output lacks, and writes it after each.

    Args:
        source: gives the messages for cells, until a time.

    Raises:
        SystemExit: the model cannot be loaded.
    """
    asked = {name: str(value) for name, value in vars(args).items() if name in RESUMED}
    results: Row = {"asked": asked, "environment": {}, "rows": []}
    if args.output.is_file():
        earlier = read_json(args.output)
        if earlier.get("asked") != asked:
            raise SystemExit(f"{args.output} is of other options: give another --output")
        results = earlier
    ends = time.monotonic() + 60 * args.minutes
    while time.monotonic() < ends:
        known = [Cell(*row["cell"]) for row in results["rows"]]
        left = [cell for cell in cells if cell not in known]
        if not left:
            break
        _, alike = next(groupby(left, lambda cell: cell.lora))  # LoRA changes what is beside it
        cell = None
        for message in source(list(alike), ends):
            if "environment" in message:
                results["environment"] = message["environment"]
            elif "begins" in message:
                cell = Cell(*message["begins"])
            elif cell is None:
                raise SystemExit(f"cannot measure: {message['found']['error']}")
            elif not results["rows"] or results["rows"][-1]["cell"] != cell:
                # Else the process has failed while it ended, which says nothing of its last row.
                results["rows"].append({"cell": cell, **message["found"]})
                write_json(args.output, results)
                print(f"{args.minutes * 60 - ends + time.monotonic():4.0f} s ", title(cell),
                      said(message["found"]), flush=True)  # fmt: skip
    results["left"] = len(cells) - len(results["rows"])
    return results


def title(cell: Cell) -> str:
    """A cell in a few words."""
    if cell.what == What.CHECK:
        return f"check: {cell.contender}"
    words = [cell.contender, cell.way]
    words += [f"batch {cell.batch}"] * (cell.batch > 1) + [f"{cell.context} tokens"]
    words += [f"temperature {cell.temperature}"] * bool(cell.temperature) + ["LoRA"] * cell.lora
    words += ["recycle"] * cell.recycle
    words += [f"over {cell.tokens}"] * bool(cell.tokens) + ["counted"] * (cell.what == What.COUNTS)
    return ", ".join(words)


def said(row: Row) -> str:
    """The figures of a row on one line."""
    figures = {name: value for name, value in row.items() if value and name != "cell"}
    shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in figures.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def line_of(cell: Cell, row: Row, base: dict[Cell, float]) -> list[str]:
    """A row of the table of calls; ``base`` has the speeds that count as 1, and gets this one."""
    star = "*" if row.get("synthetic") else ""
    name = cell.contender + " with recycle" * cell.recycle
    words = [f"{name}{star}", cell.way + ", kernel" * cell.kernel]
    words += [str(cell.batch), str(row.get("prompt_tokens", cell.context))]
    words += [f"{cell.temperature:g}", "LoRA" * cell.lora]
    if "error" in row:
        return [*words, row["error"], *[""] * (len(COLUMNS) + 1)]
    plain = cell._replace(contender=TRANSFORMERS, way=Way.EAGER, kernel=False, recycle=False)
    if cell == plain:
        base[cell] = row["tokens_per_second"]
    ratio = f"{row['tokens_per_second'] / base[plain]:.2f}x" if plain in base else ""
    figures = [f"{row[n]:.{digits}f}" if n in row else "" for n, digits in COLUMNS.values()]
    return [*words, ratio, f"{row['limit_ms'] / row['ms']:.0%}", *figures]


def print_results(results: Row) -> None:
    """The table of calls, and what else was measured."""
    about, base = results["environment"], dict[Cell, float]()
    rows = [(Cell(*row["cell"]), row) for row in results["rows"]]
    calls = [(cell, row) for cell, row in rows if cell.what == What.SPEED]
    lines = [line_of(cell, row, base) for cell, row in calls]
    heads = ["", "steps", "batch", "prompt", "T", "", "speed", "of the limit", *COLUMNS]
    names = ("device_name", "date", "model", "shape", "dtype", "torch", "transformers")
    print("\n", ", ".join(f"{name} {about.get(name)}" for name in names), sep="")
    print(f"limit: what a step reads, at the {about.get('copy_gb_per_s', 0):.0f} GB/s of a copy")
    if lines:
        print(aligned(heads, lines, 2))
    if any(row.get("synthetic") for _, row in rows):
        print(f"* accepts at rates of {about['synthetic_acceptance']}, whatever is drafted")
    for cell, row in rows:
        if cell.what != What.SPEED:
            print(f"{title(cell)}: {said(row)}")
    if results["left"]:
        print(f"{results['left']} rows are left: the same command goes on")


#: Arguments that results depend on.
RESUMED = (
    "model", "shape", "adapter", "assistant", "rates", "dtype", "device", "new_tokens", "prompts",
    "decide",
)  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    name, shape, batches, contexts, new, prompts = _DEFAULTS["cuda" if cuda else "cpu"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=name, help="a folder, a name on the Hub, or random")
    add("--shape", help=f"of {', '.join(SHAPES)}; '' for the own one of a --model, the default")
    add("--adapter", type=Path, action="append", help="its adapters' folders")
    add("--assistant", help="the model that drafts; of a widened model the small one")
    add("--rates", default="0.75,0.55,0.4,0.28,0.2,0.12", help="default: %(default)s")
    add("--batches", default=batches, help="default: %(default)s")
    add("--contexts", default=contexts, help="default: %(default)s")
    add("--only", help="contenders, with commas")
    add("--new-tokens", type=int, default=new, help="default: %(default)s")
    add("--prompts", type=int, default=prompts, help="of batch 1 (default: %(default)s)")
    add("--minutes", type=float, help="default: 7.8, with --decide 9.5")
    add("--decide", action="store_true", help="whether steps may be recorded by default")
    add("--device", default="cuda" if cuda else "cpu", help="default: %(default)s")
    add("--dtype", default="bfloat16" if cuda else "float32", help="default: %(default)s")
    add("--output", type=Path, default=Path("gpu.json"), help="default: %(default)s")
    add("--tune", action="store_true", help="the kernel's best tilings, too; takes minutes")
    add("--here", action="store_true", help="in this process, without limits")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.minutes is None:
        args.minutes = 9.5 if args.decide else 7.8
    own = args.model == name
    if args.shape is None:
        args.shape = shape if own or args.model == RANDOM else ""
    if args.adapter is None:
        shipped = Path(__file__).parents[1] / "hub_cards/adapters/smollm2-135m-instruct-medusa"
        args.adapter = [shipped if cuda else DEMO / "adapters/medusa"] * own
    try:
        if args.shape not in ("", *SHAPES) or (args.model == RANDOM and not args.shape):
            raise ValueError(f"--shape {args.shape!r}: choose from {', '.join(SHAPES)}")
        SyntheticRates.parse(args.rates)
        for name in ("batches", "contexts"):
            setattr(args, name, whole_numbers(f"--{name}", getattr(args, name)))
        if min(args.new_tokens, args.prompts) < 1:
            raise ValueError("--new-tokens and --prompts must be at least 1")
    except ValueError as error:
        parser.error(first_line(error))
    args.only = args.only.split(",") if args.only else []
    args.device, args.dtype = torch.device(args.device), getattr(torch, args.dtype)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.worker:
        for message in messages(args, [Cell(*one) for one in json.load(sys.stdin)]):
            print(json.dumps(message, default=str), flush=True)
        return
    command = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv), "--worker"]

    def source(cells: Sequence[Cell], ends: float) -> Iterator[Row]:
        return messages(args, cells) if args.here else in_another_process(command, cells, ends)

    results = measure(args, plan(args), source)
    print_results(results)
    if args.decide:
        print_verdict([(Cell(*row["cell"]), row) for row in results["rows"]])
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
