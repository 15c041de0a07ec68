"""All methods beside each other at equal training time: ``python benchmarks/comparison.py --model M
--answers A --prompts P``.

Every method that can be trained gets an adapter with its defaults, trained on the same answers for
the same time (``hf-spec train --max-minutes``). ``hf-spec bench`` then measures all of them and
``prompt_lookup`` in one process, at the policy's choice, greedily and sampled; and the greedy tau
of trees with given numbers of draft tokens, every step drafting, without lookups. The result is
``comparison.md`` in ``--output``. What exists there is not made again: an interrupted command goes
on, and methods that are added later join with their own lines.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import measured
from pages import rows_of

from hf_spec.files import read_json, write_atomically
from hf_spec.methods.registry import methods

#: Draft tokens of a step.
SIZES = (4, 8, 16, 32)
#: What needs no training.
UNTRAINED = "prompt_lookup"


def measure(
    name: str, contenders: list[str], adapters: list[Path], args: argparse.Namespace, *more: str
) -> list[dict[str, Any]]:
    """Results of contenders over all prompts, measured unless they are there."""
    words = measured.words_of(args, contenders, adapters, *more)
    runs = measured.bench(args.output / name, words)["runs"]
    return [run for run in runs if run["task"] == "all"]


def taus_by_size(adapters: dict[str, Path], args: argparse.Namespace) -> dict[str, float]:
    """tau of trees with so many draft tokens, by ``METHOD:SIZE``."""
    names = [name for name in adapters if "num_draft_tokens" not in methods()[name].declares.unused]
    always = {"drafting": "always", "lookup": False}
    sized = {
        f"{name}:{size}": {**always, "num_draft_tokens": size} for name in names for size in SIZES
    }
    options = [f"--strategy-kwargs={name}={json.dumps(given)}" for name, given in sized.items()]
    runs = measure("trees", [*sized], [adapters[name] for name in names], args, *options)
    return {run["strategy"]: run["tau"] for run in runs}


def shown(run: dict[str, Any], figure: str, unit: str = "") -> str:
    """A figure with its interval."""
    ends = run.get(f"{figure}_interval")
    between = "" if ends is None else f" ({ends[0]:.2f}-{ends[1]:.2f})"
    return f"{run[figure]:.2f}{unit}{between}"


def row_of(
    name: str, adapter: Path | None, runs: list[dict[str, Any]], taus: dict[str, float]
) -> list[str]:
    """A strategy's figures, of greedy runs and then of sampled ones, each by batch size."""
    own = [run for run in runs if run["strategy"] == name]
    phases = {key: value for key, value in own[0]["stats"].items() if key.endswith("_seconds")}
    share = phases["draft_seconds"] / sum(phases.values())
    record = read_json(adapter / "training.json") if adapter else {}
    parameters = f"{record['trainable_parameters']:,}" if adapter else "-"
    by_size = [taus.get(f"{name}:{size}") for size in SIZES]
    trees = ", ".join("-" if tau is None else f"{tau:.2f}" for tau in by_size)
    speeds = [shown(run, "speedup", "x") for run in own]
    return [f"`{name}`", parameters, f"{share:.0%}", shown(own[0], "tau"), *speeds, trees]


def main(given: list[str] | None = None) -> None:
    parser = measured.parser(
        __doc__, ["model", "answers", "prompts"], output=Path("comparison"), limit=104,
        max_new_tokens=96, threads=os.cpu_count(), dtype="native",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=10.0, help="training time of each")
    parser.add_argument("--methods", help="comma-separated; all that can be trained by default")
    parser.add_argument("--only-train", action="store_true", help="measure another time")
    args = parser.parse_args(given)
    trainable = [name for name, method in methods().items() if method.training is not None]
    names = args.methods.split(",") if args.methods else trainable
    if unknown := sorted(set(names) - set(trainable)):
        parser.error(f"{unknown[0]!r} is not trained: choose among {', '.join(trainable)}")
    print(f"training takes {len(names) * args.minutes:.0f} minutes", flush=True)
    how = ("--max-minutes", str(args.minutes), "--dtype", args.dtype)
    adapters = {
        name: measured.train(args.output / "adapters" / name, args, name, *how) for name in names
    }
    if args.only_train:
        return
    every, folders = [UNTRAINED, *names], list(adapters.values())
    sizes = ("--batch-size", "1,8")  # a batch of 8 needs as many prompts of a task
    runs = measure("greedy", every, folders, args, *sizes)
    runs += measure("sampled", every, folders, args, *sizes, "--do-sample", "--temperature=0.7")
    taus = taus_by_size(adapters, args)
    head = ["strategy", "parameters", "drafting", "tau", "B1", "B8", "B1, 0.7", "B8, 0.7"]
    head.append(f"tau at {', '.join(map(str, SIZES))} draft tokens")
    rows = [row_of(name, adapters.get(name), runs, taus) for name in every]
    table = "\n".join(rows_of(head, rows))
    write_atomically(args.output / "comparison.md", table)
    print(table)


if __name__ == "__main__":
    main()
