"""``hf-spec tune``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option, echo

from hf_spec.cli import options as opt
from hf_spec.cli.common import check_writable, explained_interrupt, progress_bar
from hf_spec.model.loading import NATIVE, load_adapters, load_model

if TYPE_CHECKING:
    from hf_spec.decoding.strategy import Strategy


def tune(
    model: opt.Model,
    adapter: Annotated[Path, Option(help="Adapter folder; learned.json is written into it.")],
    prompts: Annotated[Path, Option(help=f"Held-out prompts: {opt.PROMPTS}.")],
    limit: opt.Limit = 32,
    max_new_tokens: Annotated[int, Option(min=4, help="New tokens per prompt.")] = 128,
    max_size: Annotated[
        int,
        Option(
            min=2,
            max=512,
            help="Maximum number of step tokens of a tree of the method's own: draft tokens and "
            "probes.",
        ),
    ] = 64,
    batch_size: Annotated[
        str, Option(help="Batch sizes to learn about: 1,4. A tree is for the first one.")
    ] = "1",
    dtype: opt.Dtype = NATIVE,
    device: opt.Device = None,
    threads: opt.Threads = None,
) -> None:
    """Save what this device and these prompts teach beside an adapter.

    Answers the prompts with the adapter's strategy, whose policy learns how long steps take and how
    often predictions are right, and saves that: new processes on this device start from it instead
    of learning it in their first steps. Options of the adapter do not change. For a PPD adapter, it
    also makes the dynamic sparse tree that tree="dynamic" names. On another machine the same
    command adds an entry.

    \b
    Examples:
      hf-spec tune --model Qwen/Qwen3-0.6B --adapter ./ppd --prompts held_out.jsonl
      hf-spec tune --model M --adapter ./ppd --prompts P.jsonl --batch-size 1,8
      hf-spec bench --model M --adapter ./ppd --prompts other.jsonl
    """
    import hf_spec
    from hf_spec.adapters.checkpoint import WEIGHTS
    from hf_spec.bench import contenders as lineup
    from hf_spec.bench.prompts import encode_prompts, read_prompts, spread
    from hf_spec.decoding.strategy import Strategy
    from hf_spec.hub.folder import read_spec_config
    from hf_spec.policy.saved import LEARNED_FILE, conditions, read_entries, to_entry, write_entry

    # Everything that can be checked without a model comes first.
    sizes = opt.whole_numbers("--batch-size", batch_size)
    if not (adapter / WEIGHTS).is_file():
        raise ValueError(f"--adapter {str(adapter)!r}: there is no folder with {WEIGHTS}")
    method, options = read_spec_config(adapter)
    if method.tuned_tree is not None and options.get("tree") == method.tuned_tree.name:
        del options["tree"]  # which is about to be made
    path = adapter / LEARNED_FILE
    if path.is_file():
        read_entries(path)
    chosen = spread(read_prompts(prompts), limit)
    check_writable(adapter, "--adapter")

    loaded, tokenizer = load_model(model, dtype, device)
    load_adapters(loaded, [lineup.Adapter(str(adapter), "tuned", method.name, options)])
    ids, _ = encode_prompts(loaded, tokenizer, chosen, max_new_tokens)
    strategy = Strategy.of(loaded, hf_spec.SpecConfig(method.name, options, do_sample=False))
    with explained_interrupt("nothing was written"):
        answers = _answers(strategy, options, tokenizer, ids, sizes, max_new_tokens)
    calibrations = getattr(getattr(strategy.drafter, "source", None), "calibrations", None)
    entry = {
        **conditions(loaded, method.name, strategy.options),
        **to_entry(strategy.learned, calibrations and calibrations[False]),
    }
    if method.tuned_tree is not None:
        make = method.tuned_tree.make
        entry["tree"] = _tree(make, strategy, list(zip(ids, answers)), max_size, sizes[0])
    # Four figures are enough.
    entry = json.loads(json.dumps(entry), parse_float=lambda text: float(f"{float(text):.4g}"))
    write_entry(path, entry)
    _print(entry, path)


def _answers(
    strategy: Strategy, options: dict[str, Any], tokenizer: Any, ids: list[list[int]],
    sizes: list[int], max_new_tokens: int,
) -> list[list[int]]:  # fmt: skip
    """Answer the prompts at each batch size, from which the policy learns; return the answers."""
    from hf_spec.bench.contenders import Contender, ours
    from hf_spec.bench.session import Session
    from hf_spec.policy.budget import Budget
    from hf_spec.policy.step_policy import explore

    name, learned = strategy.method.name, strategy.learned
    learned.settings.clear()  # those that an earlier run has saved
    contender = Contender(name, ours(name, options))
    greedy = {"do_sample": False, "max_new_tokens": max_new_tokens}
    explored: set[Any] = set()
    with (
        Session.open(strategy.model, tokenizer, greedy, [contender]) as session,
        progress_bar("tuning") as progress,
    ):
        for turn, size in enumerate(sizes):
            answers: list[list[int]] = []
            while len(answers) < len(ids):
                learned.budget = Budget()  # steps are measured also where drafting does not pay
                rows = ids[len(answers) : len(answers) + size]
                answers += session.generate(contender, rows)[1]
                for key in learned.settings.keys() - explored:
                    explore(learned.settings[key])
                    explored.add(key)
                progress(turn * len(ids) + len(answers), len(sizes) * len(ids))
    return answers


def _tree(
    make: Callable[..., dict[str, Any]], strategy: Strategy,
    texts: list[tuple[list[int], list[int]]], max_size: int, batch_size: int,
) -> dict[str, Any]:  # fmt: skip
    """The tree of the method's own, by the step times at a batch size."""
    known = [one for key, one in strategy.learned.settings.items() if key[0] == batch_size]
    times = max(known, key=lambda one: one.times.steps).times
    plain = times.plain_seconds()
    if times.line is None or plain is None:
        raise ValueError(
            f"the {len(texts)} answers have too few steps to tell how long steps take; give more "
            "prompts, or a larger --max-new-tokens"
        )
    drafting, curve = times.drafting_seconds or 0.0, times.curve(max_size)
    return make(
        strategy.drafter, texts, lambda n: plain if n == 1 else curve[n] + drafting, max_size
    )


def _print(entry: dict[str, Any], path: Path) -> None:
    """Print what was learned: step times by size, and the tree."""
    for one in entry["settings"]:
        times = ", ".join(f"{n}: {1000 * s:.2f}" for n, s in one["times"]["seconds"].items())
        longest = 2 ** one["context_bits"] - 1
        echo(f"batch {one['batch_size']}, prompts up to {longest}: ms by step tokens {times}")
    if tree := entry.get("tree"):
        echo(
            f"tree: {tree['size']} step tokens, {tree['tau']:.2f} tokens per step, "
            f"{tree['speedup']:.2f}x predicted"
        )
    echo(f"saved: {path}")
