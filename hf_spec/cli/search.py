"""``hf-spec search``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_spec.cli import options as opt
from hf_spec.cli.common import INTERRUPTED, check_writable, progress_bar, require
from hf_spec.model.loading import load_model

if TYPE_CHECKING:
    from hf_spec.bench.prompts import Prompt
    from hf_spec.tuning.layers.study import Trial


def search(
    model: opt.Model,
    prompts: Annotated[Path, typer.Option(help=f"Development prompts: {opt.PROMPTS}.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the study and the adapter.")
    ],
    trials: Annotated[
        int, typer.Option(min=1, help="Total number of trials, earlier runs included.")
    ] = 100,
    limit: opt.Limit = 8,
    held_out: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of further prompts, which the trials do not see; the best choices are "
            "judged on them.",
            show_default="as many as --limit, if there are more prompts",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 64,
    objective: Annotated[
        str, typer.Option(help="modelled (reproducible) or measured (wall-clock time).")
    ] = "modelled",
    sampler: Annotated[str, typer.Option(help="tpe or random.")] = "tpe",
    dtype: opt.Dtype = "bfloat16",
    max_draft: Annotated[
        int, typer.Option(min=1, help="K, maximum number of tokens drafted per step.")
    ] = 12,
    target_acceptance: Annotated[
        float, typer.Option(help="alpha, what the adaptive draft exit aims at.")
    ] = 0.85,
    do_sample: opt.DoSample = False,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    seed: Annotated[int, typer.Option(help="Seed of the search and of the sampling.")] = 0,
    baselines: Annotated[
        bool, typer.Option(help="Compare with first, middle, last and random layers.")
    ] = True,
    device: opt.Device = None,
    threads: opt.Threads = None,
) -> None:
    """Search for the layers that layer_skip leaves out when it drafts.

    Minimises time per token on some of your prompts, and judges the best choices on others. The
    output is an adapter folder without weights, with settings, card and plots. Repeat the command
    to continue an interrupted search, or with more --trials to extend it.

    \b
    Examples:
      hf-spec search --model Qwen/Qwen3-0.6B --prompts dev.jsonl --output ./skip
      hf-spec search --model M --prompts dev.jsonl --output ./skip --trials 500 --limit 16
      hf-spec search --model M --prompts dev.jsonl --output ./skip --objective measured
      hf-spec bench --model M --adapter ./skip --prompts test.jsonl
    """
    from hf_spec.bench.prompts import read_prompts
    from hf_spec.tuning.layers.search import search as run_search
    from hf_spec.tuning.layers.study import Settings

    # Everything that can be checked without a model comes first.
    try:
        settings = Settings(
            objective=objective, sampler=sampler, seed=seed, max_new_tokens=max_new_tokens,
            max_draft=max_draft, target_acceptance=target_acceptance, do_sample=do_sample,
            **opt.sampling(do_sample, temperature, top_k, top_p),
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(_as_option(str(error))) from error
    require("search", "optuna")
    chosen, others = _divided(read_prompts(prompts), limit, held_out)
    check_writable(output)

    from rich.console import Console

    from hf_spec.bench.environment import environment_of
    from hf_spec.tuning.layers import report

    loaded, tokenizer = load_model(model, dtype, device)
    try:
        with search_bar() as (progress, status):
            result = run_search(
                loaded, tokenizer, chosen, output, settings, held_out=others, trials=trials,
                baselines=baselines, progress=progress, status=status,
            )  # fmt: skip
        with progress_bar("measuring") as update:
            bench = report.measure(loaded, tokenizer, others or chosen, result, update)
    except KeyboardInterrupt:
        bench = None
    if bench is None or bench.interrupted:
        typer.echo("interrupted; the same command continues the search", err=True)
        raise typer.Exit(INTERRUPTED)
    environment = environment_of(loaded, model, prompts)
    report.write_folder(output, loaded, result, bench, environment)
    console = Console(highlight=False)
    console.print(f"adapter: {output}", soft_wrap=True)
    report.print_result(result, bench, console)


def _divided(
    prompts: list[Prompt], limit: int | None, held_out: int | None
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of the trials and the held-out ones, both of all categories."""
    from hf_spec.bench.prompts import spread

    chosen = spread(prompts, limit)
    used = set(map(id, chosen))
    rest = [prompt for prompt in prompts if id(prompt) not in used]
    if held_out is not None and held_out > len(rest):
        raise ValueError(
            f"--held-out {held_out}: of {len(prompts)} prompts {len(chosen)} are searched on, "
            f"which leaves {len(rest)}; give more prompts, or a lower --limit"
        )
    return chosen, spread(rest, len(chosen) if held_out is None else held_out)


def _as_option(message: str) -> str:
    """A message about a field of the settings, reworded to name the option."""
    field, found = message.replace("=", " ", 1).split(" ", 1)
    return f"--{field.replace('_', '-')} {found}"


@contextmanager
def search_bar() -> Iterator[
    tuple[Callable[[int, int, Trial | None], None], Callable[[str], None]]
]:
    """Show progress on stderr: a bar on a terminal, elsewhere a line for each better choice.

    Gives ``progress(done, total, best)`` and ``status(text)``.
    """
    shown: Trial | None = None
    with progress_bar("search") as update:

        def progress(done: int, total: int, best: Trial | None) -> None:
            nonlocal shown
            text = ""
            if best is not None:
                skip = best.skip
                text = (
                    f"best {1 / best.evaluation.value:.2f}x, tau {best.evaluation.counts.tau:.2f}, "
                    f"skips {len(skip.attention)} attention + {len(skip.mlp)} MLP"
                )
            update(done, total, note=text)
            better = best is not None and (shown is None or best.skip != shown.skip)
            if better and not sys.stderr.isatty():
                typer.echo(f"trial {done} of {total}: {text}", err=True)
                shown = best

        yield progress, lambda text: update(description=text)
