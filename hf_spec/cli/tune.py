"""``hf-spec tune``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_spec.cli import options as opt
from hf_spec.cli.common import INTERRUPTED, check_writable, progress_bar
from hf_spec.model.loading import load_adapters, load_model


def tune(
    model: opt.Model,
    adapter: Annotated[Path, typer.Option(help="Adapter folder; tree.json is written into it.")],
    prompts: Annotated[
        Path, typer.Option(help=f"Held-out prompts: {opt.PROMPTS}.")
    ],
    limit: opt.Limit = 64,
    max_new_tokens: Annotated[int, typer.Option(min=4, help="New tokens per prompt.")] = 128,
    max_size: Annotated[
        int,
        typer.Option(min=2, max=512, help="Maximum number of step tokens: candidates and probes."),
    ] = 64,
    batch_size: Annotated[
        str, typer.Option(help="Batch sizes to time steps with: 1,4.")
    ] = "1",
    context: Annotated[
        str | None,
        typer.Option(help="Context lengths to time steps with: 512,4096.  "
                     "[default: the prompts with half their answers]"),
    ] = None,
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = None,
    threads: opt.Threads = None,
) -> None:  # fmt: skip
    """Choose the trees of a trained adapter for this device.

    Measures how often the adapter's predictions are right on held-out prompts and how long steps
    take, builds the best tree of every size, and chooses the size with the largest speedup. The
    trees are stored beside the adapter with device and dtype. On another machine the same command
    adds an entry; decoding uses that of its device.

    \b
    Examples:
      hf-spec tune --model Qwen/Qwen3-0.6B --adapter ./bita --prompts held_out.jsonl
      hf-spec tune --model M --adapter ./bita --prompts P.jsonl --batch-size 1,8 --context 512,4096
      hf-spec plot ./bita
      hf-spec bench --model M --adapter ./bita --prompts other.jsonl
    """
    from hf_spec.adapters.checkpoint import WEIGHTS
    from hf_spec.bench import contenders as lineup
    from hf_spec.bench.environment import environment_of
    from hf_spec.bench.prompts import read_prompts, spread
    from hf_spec.drafting.options import TUNED
    from hf_spec.files import write_atomically
    from hf_spec.hub.card import renew_card
    from hf_spec.hub.folder import TREE, change_options, read_spec_config, read_tree_file
    from hf_spec.methods.registry import methods
    from hf_spec.tuning.trees import tune as work

    # Everything that can be checked without a model comes first.
    sizes = opt.whole_numbers("--batch-size", batch_size)
    contexts: tuple[int | None, ...] = (None,)
    if context is not None:
        contexts = tuple(opt.whole_numbers("--context", context))
    settings = work.Settings(max_new_tokens, max_size, tuple(sizes), contexts)
    if not (adapter / WEIGHTS).is_file():
        raise ValueError(f"--adapter {str(adapter)!r}: there is no folder with {WEIGHTS}")
    method, options = read_spec_config(adapter)
    if not work.tunable(method):
        known = [name for name, one in methods().items() if work.tunable(one)]
        raise ValueError(
            f"--adapter {str(adapter)!r} is for strategy {method.name!r}, which has no trees to "
            f"tune; those of {', '.join(known)} can be"
        )
    before = read_tree_file(adapter)
    chosen = spread(read_prompts(prompts), limit)
    check_writable(adapter, "--adapter")

    loaded, tokenizer = load_model(model, dtype, device)
    load_adapters(loaded, [lineup.Adapter(str(adapter), "tuned", method.name, options)])
    environment = environment_of(loaded, model, prompts)
    try:
        tuner = work.TreeTuner(loaded, tokenizer, chosen, method, options, settings)
        with progress_bar("tuning") as progress:
            entry = work.tune(tuner, environment, progress)
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    weights = hashlib.sha256((adapter / WEIGHTS).read_bytes()).hexdigest()
    with renew_card(adapter):
        data = work.with_entry(before, entry, weights)
        write_atomically(adapter / TREE, json.dumps(data))
        change_options(adapter, {**work.without_shape(method, options), "tree": TUNED})
    _print(entry, adapter / TREE)


def _print(entry: dict[str, Any], path: Path) -> None:
    """Print accuracies and, for each setting, the chosen size among a few others."""
    from rich.console import Console

    from hf_spec.bench.report import new_table

    console = Console(highlight=False)
    console.print(
        f"{entry['prompts']} prompts, {entry['tokens']:,} tokens; right at distance "
        + ", ".join(
            f"{d}: {row[0]:.0%} (top 10: {sum(row[:10]):.0%})"
            for d, row in enumerate(entry["accuracies"], start=1)
        ),
        soft_wrap=True,
    )
    for setting in entry["settings"]:
        title = f"batch {setting['batch_size']}, context {setting['context']}"
        heads = ("step tokens", "tau", "static", "random", "step, ms", "speedup")
        shown = new_table(title, (), heads)
        table = zip(entry["sizes"], setting["step_seconds"], setting["speedups"])
        for size, seconds, speedup in table:
            best = size["size"] == setting["size"]
            if best or size["size"] in (4, 8, 16, 24, 32, 48, 64, 96, 128):
                shown.add_row(
                    f"{size['size']}{' *' if best else ''}", f"{size['tau']:.2f}",
                    f"{size['static_tau']:.2f}", f"{size['random_tau']:.2f}",
                    f"{1000 * seconds:.2f}", f"{speedup:.2f}x",
                )  # fmt: skip
        console.print(shown)
    console.print(f"trees: {path}", soft_wrap=True)
