"""All main tables of a model: ``python benchmarks/all.py --model M --prompts P [--adapter A ...]``.

Measures, beside plain generation and Transformers' own features on the same prompts,

* ``batches``: strategies by batch size, greedy and sampled;
* ``tasks``: each category of the prompts;
* ``contexts``: prompts of several lengths;
* ``compiled``: compiled steps beside eager ones;
* ``vllm``: vLLM beside them, with ``--vllm-python`` (``vllm.py`` says how to install it).

Each table is made of steps: one ``hf-spec bench`` each, in a process of its own, whose results are
written at once. What exists in ``--output`` is not measured again, so an interrupted command goes
on. A short trial comes first, from which follows how long each step will take. ``figures.md`` holds
all tables that there are, each with its command.

M is a folder, a repository on the Hub, or a name that ``real_models.py`` knows. Prompts are those
of Spec-Bench, or others with categories.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import measured
from pages import Row, agreement, by_column, by_strategy, by_task, environment
from real_models import folder_of
from transformers import AutoConfig, AutoTokenizer

from hf_spec.core.checks import duration, first_line
from hf_spec.files import write_atomically
from hf_spec.tools.bench.contenders import STOCK, parse_names
from hf_spec.tools.bench.prompts import Prompt, context_limit, encode, read_prompts, spread
from hf_spec.tools.cli.common import whole_numbers
from hf_spec.tools.loading import NATIVE, native_dtype, read_adapters

#: Sampling of the tables; None is greedy decoding.
TEMPERATURES = (None, 0.7, 1.0)
#: Seconds for forecasts: until a model is loaded, a contender's code is compiled, and
#: vLLM has started.
LOADING, COMPILING, STARTING = 20.0, 60.0, 60.0
VLLM = Path(__file__).with_name("vllm.py")


class Step(NamedTuple):
    """What one process measures.

    Attributes:
        name: of its folder.
        words: arguments of ``hf-spec bench``, or of ``vllm.py``.
        seconds: forecast of its time from those of a prompt, by the prompt's length.
        column: head of its column in a table that several steps share.
    """

    name: str
    words: list[str]
    seconds: Callable[[Callable[[int], float]], float]
    column: str = ""


class Table(NamedTuple):
    """Some steps shown together; ``group`` is what ``--only`` selects by."""

    group: str
    title: str
    steps: list[Step]
    show: Callable[[Sequence[Row], Sequence[str]], list[str]]


def words_of(args: argparse.Namespace, prompts: Path, limit: int, *more: str) -> list[str]:
    """Arguments of ``hf-spec bench``."""
    assistant = ["--assistant", args.assistant] if args.assistant else []
    return measured.words_of(
        args, args.names, args.adapter, *assistant, *more, prompts=prompts, limit=limit
    )


def tables(args: argparse.Namespace) -> list[Table]:
    """All tables that can be made with these arguments."""
    prompts = args.prompts
    limit = min(args.limit, len(read_prompts(prompts)))
    even = args.output / "prompts-batches.jsonl"
    count = write_even(even, read_prompts(prompts), limit, max(args.batch_sizes))
    found = []
    for temperature in TEMPERATURES:
        kind = "greedy" if temperature is None else f"{temperature}"
        sampled = ["--do-sample", "--temperature", kind] if temperature is not None else []
        steps = [
            Step(
                f"batches-{kind}-{size}",
                words_of(args, even, count, "--batch-size", str(size), *sampled),
                # A batch takes longer than a row, and less long than its rows one by one.
                lambda each, size=size: count * each(0) / size**0.5, f"batch {size}",
            )
            for size in args.batch_sizes
        ]  # fmt: skip
        title = "greedy" if temperature is None else f"temperature {temperature}"
        found.append(Table("batches", f"Batch sizes, {title}", steps, by_column))
    tasks = Step("tasks", words_of(args, prompts, limit), lambda each: limit * each(0))
    found.append(Table("tasks", "Each task", [tasks], by_task))
    steps = [
        Step(
            f"context-{length}", words_of(args, write_long(args, length), limit),
            lambda each, length=length: limit * each(length), f"{length} tokens",
        )
        for length in args.contexts
        if not args.only or "contexts" in args.only
    ]  # fmt: skip
    found.append(Table("contexts", "Lengths of the prompt", steps, by_column))
    compiled = Step(
        "compiled", words_of(args, prompts, limit, "--compile"),
        lambda each: 2 * limit * each(0) + COMPILING * (1 + len(args.names)),
    )  # fmt: skip
    found.append(Table("compiled", "Compiled steps", [compiled], by_strategy))
    if args.vllm_python:
        words = [
            "--vllm-python", args.vllm_python, "--model", args.model, "--prompts", str(prompts),
            "--limit", str(limit), "--max-new-tokens", str(args.max_new_tokens), "--dtype",
            args.dtype, "--threads", str(args.threads), "--repeats", "1", "--vllm", args.vllm,
            *(f"--adapter={one}" for one in args.adapter),
        ]  # fmt: skip
        start = STARTING * len(args.vllm.split(","))
        step = Step("vllm", words, lambda each: 3 * limit * each(0) + start)
        found.append(Table("vllm", "Beside vLLM", [step], lambda results, _: [results[0]["table"]]))
    found = [table for table in found if table.steps]
    return [one for one in found if not args.only or one.group in args.only]


def write_even(path: Path, prompts: Sequence[Prompt], limit: int, size: int) -> int:
    """Write prompts that fill batches of this size, which never mix categories: the same ones for
    all sizes.

    Returns:
        How many these are.

    Raises:
        ValueError: no category has as many.
    """
    named = [one.category for one in prompts]
    large = [name for name in dict.fromkeys(named) if named.count(name) >= size]
    if not large:
        raise ValueError(f"no category has {size} prompts, which a batch of {size} needs")
    large = large[: max(limit // size, 1)]
    each = max(limit // len(large) // size, 1) * size
    chosen = [
        one
        for name in large
        for one in spread([prompt for prompt in prompts if prompt.category == name], each)
    ]
    write_prompts(path, chosen)
    return len(chosen)


def write_long(args: argparse.Namespace, length: int) -> Path:
    """Write prompts of at most this many tokens, hardly fewer: the text of others comes before
    each, and none twice, as what repeats itself is easy to draft.

    Raises:
        ValueError: all prompts together have fewer.
    """
    prompts, tokenizer = read_prompts(args.prompts), AutoTokenizer.from_pretrained(args.model)
    found = []
    for prompt in spread(prompts, args.limit):
        place, text = prompts.index(prompt), prompt.text
        others = iter([*prompts[place + 1 :], *prompts[:place]])
        while (size := len(encode(tokenizer, text, prompt.history))) < length:
            other = next(others, None)
            if other is None:
                raise ValueError(f"all prompts together have {size} tokens, fewer than {length}")
            text = f"{other.text}\n\n{text}"
        while (size := len(encode(tokenizer, text, prompt.history))) > length:
            text = text[max(1, len(text) * (size - length) // size) :]
        found.append(replace(prompt, text=text))
    path: Path = args.output / f"prompts-{length}.jsonl"
    write_prompts(path, found)
    return path


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    rows = []
    for one in prompts:
        said = [*(message._asdict() for message in one.history)]
        said.append({"role": "user", "content": one.text})
        row = {"question_id": one.question_id, "category": one.category, "messages": said}
        rows.append(json.dumps(row))
    write_atomically(path, "\n".join(rows))


# -- measuring -----------------------------------------------------------------------------------


def is_done(step: Step, output: Path) -> bool:
    return measured.is_measured(output / step.name, step.words)


def take(step: Step, output: Path) -> Row:
    """Results of a step, measured unless they are there.

    Raises:
        SystemExit: it failed.
    """
    folder = output / step.name
    if step.name != "vllm":
        return measured.bench(folder, step.words)
    words = [*step.words, "--json", str(folder / "results.json")]
    return measured.kept(folder, step.words, lambda: measured.run("vllm.py", [str(VLLM)], words))


def trial(args: argparse.Namespace, longest: int) -> Callable[[int], float]:
    """Seconds that all contenders together take for one prompt, by its length; 0 for its own.

    Args:
        longest: length that is measured besides; 0 for none.
    """
    output, lengths = args.output / "trial", [0, longest] if longest else [0]
    known: dict[int, float] = {}
    for length in lengths:
        prompts = write_long(args, length) if length else args.prompts
        results = measured.bench(output / str(length), words_of(args, prompts, 1))
        calls = results["calls"]
        known[length] = sum(call["seconds"] for call in calls)

    def each(length: int) -> float:
        share = length / longest if longest else 0.0
        return known[0] + share * max(known[longest] - known[0], 0.0)

    return each


def measure(args: argparse.Namespace, chosen: list[Table]) -> list[str]:
    """Take all steps that are left; returns what has failed."""
    left = {
        step.name: step
        for table in chosen
        for step in table.steps
        if not is_done(step, args.output)
    }
    if not left:
        return []
    long = any(table.group == "contexts" for table in chosen)
    each = trial(args, max(args.contexts) if long else 0)
    forecast = {name: LOADING + step.seconds(each) for name, step in left.items()}
    for name, seconds in forecast.items():
        print(f"{name}: about {duration(seconds)}")
    print(f"in all: about {duration(sum(forecast.values()))}", flush=True)
    took, expected, failed = 0.0, 0.0, []
    for name, step in left.items():
        start = time.monotonic()
        try:
            take(step, args.output)
        except SystemExit as error:
            failed.append(f"{name}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
        took, expected = took + time.monotonic() - start, expected + forecast.pop(name)
        write_page(args, chosen)
        if forecast:
            rest = sum(forecast.values()) * took / expected
            print(f"{name} done, about {duration(rest)} left", flush=True)
    return failed


def write_page(args: argparse.Namespace, chosen: list[Table]) -> None:
    """Write ``figures.md`` from all results that there are."""
    lines = [
        f"# Figures of {args.title}", "",
        "Speed over plain `generate` in the same process, with tau in brackets and the 95 % "
        f"interval of the speed; {args.max_new_tokens} new tokens at most.",
    ]  # fmt: skip
    for table in chosen:
        steps = [step for step in table.steps if is_done(step, args.output)]
        if not steps:
            continue
        results = [take(step, args.output) for step in steps]
        ours = [one for one in results if "runs" in one]
        script = "hf-spec bench" if ours else "python benchmarks/vllm.py"
        commands = [f"{script} {shlex.join(step.words)}" for step in steps]
        lines += ["", f"## {table.title}", "", "```bash", *commands, "```", ""]
        lines += table.show(results, [step.column for step in steps])
        if ours:
            notes = [part for part in (agreement(ours), environment(ours)) if part]
            lines += ["", " ".join(notes)]
    write_atomically(args.output / "figures.md", "\n".join(lines))


# -- the command ---------------------------------------------------------------------------------


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    groups = ("batches", "tasks", "contexts", "compiled", "vllm")
    parser = measured.parser(
        __doc__, ["model", "prompts"], adapter=[], output=Path("all"), limit=48,
        max_new_tokens=128, dtype=NATIVE, threads=os.cpu_count(),
    )  # fmt: skip
    add = parser.add_argument
    add("--strategies", help="default: prompt_lookup and those of the adapters")
    add("--assistant", help="smaller model: draft_model and Transformers' assisted take part")
    add("--only", help=f"of {','.join(groups)}, with commas (default: all)")
    add("--batch-sizes", default="1,4,8,16", help="default: %(default)s")
    add("--contexts", default="512,2048,6144", help="default: %(default)s")
    add("--vllm-python", help="interpreter of an environment with vLLM")
    add("--vllm", default="plain,ngram,suffix", help="what vLLM runs (default: %(default)s)")
    args = parser.parse_args(given)
    args.only = args.only.split(",") if args.only else []
    if args.dtype == NATIVE:  # vllm.py knows dtypes only
        args.dtype = native_dtype(None)
    try:
        if unknown := [name for name in args.only if name not in groups]:
            raise ValueError(f"--only {unknown[0]}: choose from {', '.join(groups)}")
        if "vllm" in args.only and not args.vllm_python:
            raise ValueError("--only vllm needs --vllm-python")
        args.batch_sizes = whole_numbers("--batch-sizes", args.batch_sizes)
        args.contexts = whole_numbers("--contexts", args.contexts)
        own = [one.strategy for one in read_adapters(args.adapter)]
        names = parse_names(args.strategies or ",".join(["prompt_lookup", *own]))
        stock = [f"{STOCK}prompt_lookup"]
        if args.assistant:
            stock += ["draft_model", f"{STOCK}assisted"]
        args.names = list(dict.fromkeys([*names, *stock]))
        args.title = args.model  # and from here on its folder or repository
        args.model = folder_of(args.model, args.output / "models" / Path(args.model).name)
        model: Any = SimpleNamespace(config=AutoConfig.from_pretrained(args.model))
        limit = context_limit(model, SimpleNamespace()) or sys.maxsize
        long = [length for length in args.contexts if length + args.max_new_tokens > limit]
        args.contexts = [length for length in args.contexts if length not in long]
        if long:
            print(f"left out: prompts of {', '.join(map(str, long))} tokens, beyond its context")
    except (ValueError, OSError) as error:
        parser.error(first_line(error))
    return args


def main(given: Sequence[str] | None = None) -> None:
    args = parse(given)
    try:
        chosen = tables(args)
    except ValueError as error:
        sys.exit(f"all.py: {first_line(error)}")
    failed = measure(args, chosen)
    write_page(args, chosen)
    print(args.output / "figures.md")
    if failed:
        sys.exit("\n".join(["not measured:", *failed]))


if __name__ == "__main__":
    main()
