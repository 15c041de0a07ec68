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


def by_size(name: str, size: int) -> tuple[str, str]:
    """A contender whose trees have so many draft tokens, and its options."""
    options = {"drafting": "always", "lookup": False, "num_draft_tokens": size}
    return f"{name}:{size}", f"{name}:{size}={json.dumps(options)}"


def shown(run: dict[str, Any], figure: str, unit: str = "") -> str:
    """A figure with its interval."""
    ends = run.get(f"{figure}_interval")
    between = "" if ends is None else f" ({ends[0]:.2f}-{ends[1]:.2f})"
    return f"{run[figure]:.2f}{unit}{between}"


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
    greedy = measure("greedy", every, folders, args, *sizes)
    sampled = measure("sampled", every, folders, args, *sizes, "--do-sample", "--temperature=0.7")
    sized = [name for name in names if "num_draft_tokens" not in methods()[name].drafter.unused]
    contenders = [by_size(name, size) for name in sized for size in SIZES]
    options = [f"--strategy-kwargs={option}" for _, option in contenders]
    labels, own = [label for label, _ in contenders], [adapters[name] for name in sized]
    trees = measure("trees", labels, own, args, *options)
    taus = {run["strategy"]: run["tau"] for run in trees}
    head = ["strategy", "parameters", "drafting", "tau", "B1", "B8", "B1, 0.7", "B8, 0.7"]
    head.append(f"tau at {', '.join(map(str, SIZES))} draft tokens")
    rows = []
    for name in every:
        found = {
            (kind, run["batch_size"]): run
            for kind, runs in (("greedy", greedy), ("sampled", sampled))
            for run in runs
            if run["strategy"] == name
        }
        first = found["greedy", 1]
        phases = {key: value for key, value in first["stats"].items() if key.endswith("_seconds")}
        share = phases["draft_seconds"] / sum(phases.values())
        parameters = "-"
        if name in adapters:
            parameters = f"{read_json(adapters[name] / 'training.json')['trainable_parameters']:,}"
        speeds = [shown(found[key], "speedup", "x") for key in sorted(found)]
        tau_of = [taus.get(f"{name}:{size}") for size in SIZES]
        at = ", ".join("-" if tau is None else f"{tau:.2f}" for tau in tau_of)
        figures = [parameters, f"{share:.0%}", shown(first, "tau"), *speeds, at]
        rows.append([f"`{name}`", *figures])
    table = "\n".join(rows_of(head, rows))
    write_atomically(args.output / "comparison.md", table)
    print(table)


if __name__ == "__main__":
    main()
