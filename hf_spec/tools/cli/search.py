"""``hf-spec search``."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option, echo

from hf_spec.core.limits import MAX_DRAFT_TOKENS
from hf_spec.tools.cli import options as opt
from hf_spec.tools.cli.common import check_writable, explained_interrupt, require
from hf_spec.tools.loading import NATIVE, load_model


def search(
    model: opt.Model,
    prompts: Annotated[str, Option(help=f"Development prompts: {opt.PROMPTS}.")],
    output: opt.Output,
    trials: Annotated[int, Option(min=1, help="Number of trials, earlier runs included.")] = 100,
    limit: opt.Limit = 8,
    held_out: Annotated[
        int | None,
        Option(
            min=0, help="Further prompts, on which the best are measured.  [default: as --limit]"
        ),
    ] = None,
    max_new_tokens: Annotated[int, Option(min=2, help="New tokens per prompt.")] = 64,
    dtype: opt.Dtype = NATIVE,
    num_draft_tokens: Annotated[
        int,
        Option(
            "--num-draft-tokens",
            "--max-draft",
            min=1,
            max=MAX_DRAFT_TOKENS,
            help="K, most tokens drafted in a step.",
        ),
    ] = 12,  # fmt: skip
    seed: opt.Seed = 0,
    device: opt.Device = None,
    threads: opt.Threads = None,
) -> None:
    """Search for the layers that layer_skip leaves out when it drafts.

    Maximizes tokens per second on some of your prompts, and measures the best choices on others, in
    turns with plain decoding. The output is an adapter folder without weights, with settings and
    card. Repeat the command to continue an interrupted search, or with more --trials to extend it.
    The study is Optuna's: its dashboard and its plots read study.jsonl.

    \b
    Examples:
      hf-spec search --model Qwen/Qwen3-0.6B --prompts dev.jsonl --output ./skip
      hf-spec search --model M --prompts dev.jsonl --output ./skip --trials 500 --limit 16
      hf-spec bench --model M --adapter ./skip --prompts test.jsonl
    """
    from hf_spec.tools.bench.prompts import read_prompts

    require("search", "optuna", "scipy")

    from hf_spec.tools.search.layers import LayerSearch

    chosen, others = _divided(read_prompts(prompts), limit, held_out)
    check_writable(output)

    from hf_spec.files import writing

    loaded, tokenizer = load_model(model, dtype, device)
    with writing(output), explained_interrupt("the same command continues the search"):
        work = LayerSearch(
            loaded, tokenizer, chosen, output,
            max_new_tokens=max_new_tokens, num_draft_tokens=num_draft_tokens, seed=seed,
        )  # fmt: skip
        work.search(trials)
        choice, finalists, bench = work.confirm(others or chosen)
    row = _write(output, model, prompts, work, choice, finalists, bench, len(others))
    echo(
        f"skips attention {choice['skip_attention']} and MLP {choice['skip_mlp']}: "
        f"{row['speedup']:.2f}x plain decoding, tau {row['tau']:.2f}, "
        f"{row['tokens_per_second']:.1f} tokens/s on {row['prompts']} "
        f"{'held-out' if others else 'development'} prompts"
    )
    if row["speedup"] < 1:
        echo("note: not faster here; small models leave drafting little to save")
    echo(f"adapter: {output}")


def _write(
    output: Path, model: str, prompts: str, work: Any, choice: Any, finalists: Any, bench: Any,
    held_out: int,
) -> dict[str, Any]:  # fmt: skip
    """Write the adapter, the search and what was measured; returns the figures of all prompts."""
    from hf_spec.files import write_json
    from hf_spec.methods.registry import get_method
    from hf_spec.tools.bench.environment import environment_of, package_version
    from hf_spec.tools.bench.report import write_results
    from hf_spec.tools.hub.card import RESULTS, SEARCH, write_card
    from hf_spec.tools.hub.folder import attached, save_adapter
    from hf_spec.tools.search.layers import STRATEGY

    environment = environment_of(work.model, model, prompts)
    config_class: Any = get_method(STRATEGY).adapter_config
    with attached(work.model, config_class(**choice)) as peft_model:  # which has no weights
        save_adapter(peft_model, output, STRATEGY, {"num_draft_tokens": work.num_draft_tokens})
    row: dict[str, Any] = bench.overall(STRATEGY)
    data = {
        "environment": {**environment, "optuna": package_version("optuna")},
        "identity": work.study.user_attrs["identity"],
        "trials": work.finished,
        "held_out": held_out,
        "best": {**choice, "speedup": row["speedup"], "tau": row["tau"]},
        "finalists": finalists,
    }
    write_json(output / SEARCH, data)
    # The file of prompts is the same, the prompts are others.
    write_results(output / RESULTS, bench, {**environment, "held_out": bool(held_out)})
    write_card(output)
    return row


def _divided(
    prompts: list[Any], limit: int | None, held_out: int | None
) -> tuple[list[Any], list[Any]]:
    """The prompts of the trials and the held-out ones, both of all categories."""
    from hf_spec.tools.bench.prompts import spread

    chosen = spread(prompts, limit)
    used = set(map(id, chosen))
    rest = [prompt for prompt in prompts if id(prompt) not in used]
    if held_out is not None and held_out > len(rest):
        raise ValueError(
            f"--held-out {held_out}: of {len(prompts)} prompts {len(chosen)} are searched on, "
            f"which leaves {len(rest)}; give more prompts, or a lower --limit"
        )
    return chosen, spread(rest, len(chosen) if held_out is None else held_out)
