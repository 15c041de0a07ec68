"""Writes the result of a search to an adapter folder, and prints it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_spec.bench import report as bench_report
from hf_spec.bench.contenders import Contender, ours
from hf_spec.bench.environment import package_version
from hf_spec.bench.figures import can_draw
from hf_spec.bench.prompts import Prompt
from hf_spec.bench.results import BenchResult
from hf_spec.bench.runner import run
from hf_spec.files import write_atomically
from hf_spec.hub.card import RESULTS, SEARCH, write_card
from hf_spec.hub.folder import save_spec_config, save_weightless
from hf_spec.methods.registry import get_method
from hf_spec.tuning.layers.objective import STRATEGY
from hf_spec.tuning.layers.plots import plot_search

if TYPE_CHECKING:
    from rich.console import Console

    from hf_spec.tuning.layers.search import SearchResult


def measure(
    model: Any, tokenizer: Any, prompts: list[Prompt], result: SearchResult, progress: Any
) -> BenchResult:
    """Measure the result beside plain decoding, as ``hf-spec bench`` does."""
    options = {**result.best.skip.options(), **result.options()}
    contender = Contender(STRATEGY, ours(STRATEGY, options))
    settings = result.settings
    return run(
        model, tokenizer, prompts, [contender], max_new_tokens=settings.max_new_tokens,
        generate_kwargs={"do_sample": settings.do_sample, **settings.sampling},
        seed=settings.seed, progress=progress,
    )  # fmt: skip


def write_folder(
    folder: Path, model: Any, result: SearchResult, bench: BenchResult, environment: dict[str, Any]
) -> None:
    """Write the adapter with its settings, ``search.json``, ``results.json``, plots and card."""
    environment = {**environment, "optuna": package_version("optuna")}
    config_class = get_method(STRATEGY).adapter_config
    assert config_class is not None
    save_weightless(model, config_class(**result.best.skip.options()), folder)
    save_spec_config(folder, STRATEGY, result.options())
    data = {"environment": environment, **result.to_dict()}
    write_atomically(folder / SEARCH, json.dumps(data, indent=1))
    measured_on = {"held_out": bool(result.finalists)}  # the same file, other prompts
    bench_report.write_results(folder / RESULTS, bench, {**environment, **measured_on})
    if can_draw():
        plot_search(folder, folder)
    write_card(folder)


def print_result(result: SearchResult, bench: BenchResult, console: Console) -> None:
    """Print the choice, the baselines, the draft exits and the measured speedup."""
    best, kind = result.best, result.settings.objective
    pruned = sum(trial.state == "pruned" for trial in result.trials)
    repeats = sum(trial.repeat for trial in result.trials)
    console.print(
        f"best of {len(result.trials)} trials ({pruned} pruned, {repeats} repeats): skips "
        f"attention {list(best.skip.attention)} and MLP {list(best.skip.mlp)} "
        f"of {result.sublayers.count} layers",
        soft_wrap=True,
    )

    def figures(row: dict[str, Any]) -> list[str]:
        return [f"{row['speedup']:.2f}x", f"{row['tau']:.2f}", f"{row['acceptance']:.0%}"]

    heads = [f"speedup ({kind})", "tau", "accepted"]
    if result.baselines is not None:
        table = bench_report.new_table("equally many skipped sublayers", ["choice"], heads)
        for row in result.baselines:
            table.add_row(row["name"], *figures(row))
        console.print(table)
    heads = ["K", "gamma", "target", *heads]
    table = bench_report.new_table("when to stop drafting", ["exit"], heads)
    for row in result.exits:
        name = row["draft_exit"] + (" (best)" if row["best"] else "")
        names = ("max_draft", "threshold", "target_acceptance")
        table.add_row(name, *(str(row.get(option, "")) for option in names), *figures(row))
    console.print(table)
    row = bench.overall(STRATEGY)
    console.print(
        f"measured: {row['speedup']:.2f}x plain decoding, tau {row['tau']:.2f}, "
        f"{row['tokens_per_second']:.1f} tokens/s",
        soft_wrap=True,
    )
    if result.finalists:
        console.print(
            f"on {result.finalists[0]['prompts']} held-out prompts; on those of the search it "
            f"{'is modelled' if kind == 'modelled' else 'was measured'} at "
            f"{1 / best.evaluation.value:.2f}x",
            soft_wrap=True,
        )
    if row["speedup"] < 1:
        console.print(
            "note: not faster than plain decoding here; small models leave drafting little to save",
            soft_wrap=True,
        )
