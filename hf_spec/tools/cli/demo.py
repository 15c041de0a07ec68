"""``hf-spec demo``."""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

from hf_spec.tools.cli import options as opt
from hf_spec.tools.cli.common import check_writable, show_results
from hf_spec.tools.loading import NATIVE

#: Lines of the prompt and of the continuation that are shown.
SHOWN_LINES = 12


def demo(
    output: opt.Output = Path("hf-spec-demo"),
    model: Annotated[
        str | None,
        Option(help="Instead of the small one: folder or repository; adapters of ours that fit."),
    ] = None,
    limit: Annotated[int, Option(min=1, help="Prompts; there are 8, with --model 24.")] = 6,
    max_new_tokens: opt.NewTokens = 96,
    dtype: opt.Dtype = NATIVE,
    threads: opt.Threads = None,
) -> None:
    """See a small model write the same code, faster.

    The model ships with the package and has read the modeling code of Transformers. It continues
    beginnings of classes, plainly and with each strategy; texts are compared and timed, in less
    than a minute. With --model, another model answers the prompts of hf-spec bench. Without
    --model, nothing is downloaded. Exits with an error if an output differs from plain generate's
    other than at a tie of two tokens.

    \b
    Examples:
      hf-spec demo
      hf-spec demo --limit 8 --max-new-tokens 256
      hf-spec demo --dtype float32 --output ./demo
      hf-spec demo --model HuggingFaceTB/SmolLM2-135M-Instruct
    """
    check_writable(output)

    from hf_spec.tools.bench.contenders import contenders
    from hf_spec.tools.bench.environment import environment_of
    from hf_spec.tools.bench.runner import run
    from hf_spec.tools.data import ALL
    from hf_spec.tools.demo.demo import FREE_STRATEGY, load

    loaded, tokenizer, adapters, prompts = load(model, dtype, limit)
    names = dict.fromkeys([FREE_STRATEGY, *(adapter.strategy for adapter in adapters)])
    lineup = contenders(names, adapters=adapters)
    count = f"{len(prompts)} prompt{'s' * (len(prompts) != 1)}"
    ways = ", ".join(one.name for one in lineup)
    echo(f"{count}, up to {max_new_tokens} new tokens each, plainly and with {ways}", err=True)
    result = run(loaded, tokenizer, prompts, lineup, max_new_tokens=max_new_tokens, title="demo")
    drafted = next((one for one in result.measurements if one.stats is not None), None)
    if drafted is not None:
        given = prompts[drafted.prompts[0]].text.splitlines()
        written = tokenizer.decode(drafted.rows[0], skip_special_tokens=True).splitlines()
        written = written[:-1] or written  # the last line may be cut off
        echo("\n".join([
            "--- a prompt ---", *given[-SHOWN_LINES:],
            "--- what the model writes after it, with and without speculation ---",
            *written[:SHOWN_LINES], "---",
        ]))  # fmt: skip
    show_results(result, environment_of(loaded, model or "demo model", None), output)
    rows = [row for row in result.rows if row["task"] == ALL]
    if any(row["diverged"] for row in rows):
        raise ValueError("an output differs from plain generate's other than at a tie")
    ties = sum(row["diverged_at_tie"] for row in rows)
    but = f", but for {ties} that part where two tokens tie in this dtype" if ties else ""
    echo(f"Every output equals plain generate's{but}.")
