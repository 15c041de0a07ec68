"""``hf-spec quality``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_spec.cli import options as opt
from hf_spec.cli.common import check_writable, progress_bar, require, taking_part
from hf_spec.model.loading import load_model

DEFAULT_OUTPUT = Path("hf-spec-quality")


def quality(
    model: opt.Model,
    prompts: Annotated[Path, typer.Option(help=f"{opt.PROMPTS}, with an answer each.")],
    adapter: opt.Adapters = None,
    strategies: Annotated[
        str | None,
        typer.Option(help="As for 'hf-spec bench'.  [default: those of the adapters]"),
    ] = None,
    strategy_kwargs: opt.KwargsByName = None,
    dtype: opt.Dtype = "bfloat16",
    max_new_tokens: opt.NewTokens = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 8,
    limit: opt.Limit = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for quality.json.")
    ] = DEFAULT_OUTPUT,
    device: opt.Device = None,
    threads: opt.Threads = None,
    as_json: opt.AsJson = False,
) -> None:
    """Score answers that may differ from the base model's.

    These are the answers of adapters that fine-tune the model (space) and of lossy acceptance;
    exact strategies are left out. Greedy. Prints and writes to quality.json: perplexity of the
    references, chrF of the answers, how often an answer's last number is the reference's, and the
    share of answers equal to the base model's.

    \b
    Examples:
      hf-spec quality --model M --adapter ./space --adapter ./sft --prompts gsm8k.jsonl
      hf-spec quality --model M --adapter ./bita --prompts P.jsonl --limit 100 \\
          --strategy-kwargs 'bita={"acceptance": "typical"}'
    """
    from hf_spec.bench import contenders as lineup
    from hf_spec.bench import quality as work
    from hf_spec.bench import report
    from hf_spec.bench.environment import environment_of
    from hf_spec.bench.prompts import read_prompts, spread
    from hf_spec.files import write_atomically

    require("quality", "sacrebleu")
    adapters, names, options = taking_part(adapter, strategies, strategy_kwargs)
    everyone = lineup.contenders(names, options, adapters)
    chosen = spread(read_prompts(prompts), limit)
    check_writable(output)
    loaded, tokenizer = load_model(model, dtype, device)
    lineup.load_adapters(loaded, adapters)
    scored = work.measured(everyone)
    environment = environment_of(loaded, model, prompts)
    with progress_bar("quality") as progress:
        scores = work.quality(
            loaded, tokenizer, chosen, scored, max_new_tokens, batch_size, progress
        )
    data = {"environment": environment, "quality": [vars(one) for one in scores]}
    write_atomically(output / "quality.json", json.dumps(data, indent=1))
    if as_json:
        typer.echo(json.dumps(data["quality"], indent=1))
        return

    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    title = f"{len(chosen)} prompts, {max_new_tokens} new tokens at most"
    heads = ("perplexity", "chrF", "last number", "identical")
    table = report.new_table(title, ["answers of"], heads)
    for one in scores:
        share = "-" if one.last_number is None else f"{one.last_number:.1%}"
        table.add_row(
            one.strategy, f"{one.perplexity:.3f}", f"{one.chrf:.1f}", share, f"{one.identical:.0%}"
        )
    console.print(table)
    left_out = [one.name for one in everyone if one not in scored]
    if left_out:
        console.print(f"exact, so that their answers are plain decoding's: {', '.join(left_out)}")
    console.print(f"results: {output / 'quality.json'}", soft_wrap=True)
