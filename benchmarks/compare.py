"""Contenders beside each other, with paired intervals: ``python benchmarks/compare.py A B ...``.

Reads ``results.json`` of ``hf-spec bench``, from several folders if adapters of one type were
measured one after the other on the same prompts. For each contender it prints tau and speedup, and
beside ``--against`` (the first one by default) the difference of tau and the ratio of speedups,
with 95% intervals from resampling the prompts that both have answered (paired bootstrap; see
``hf_spec/tools/bench/results.py``). A difference whose interval holds 0, or a ratio whose interval
holds 1, is within the noise of these prompts. It says nothing about other training seeds: train
several, and compare those.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from hf_spec.core.checks import first_line
from hf_spec.files import read_json
from hf_spec.tools.bench.results import aligned, interval

#: Tokens, forwards and seconds of a prompt or batch, then the same of its baseline.
Sums = tuple[float, ...]


class Measured(NamedTuple):
    """A contender's sums for each group of prompts, and the batch size."""

    name: str
    batch_size: int
    calls: dict[tuple[int, ...], Sums]


def read(folders: list[Path]) -> list[Measured]:
    """The contenders of some folders; of several folders, their names begin with the folder's.

    Raises:
        ValueError: a folder has no results, or none of a contender's baseline.
    """
    found = []
    for folder in folders:
        data = read_json(folder / "results.json")
        groups: dict[tuple[int, str], dict[tuple[int, ...], Sums]] = {}
        for call in data["calls"]:
            own = groups.setdefault((call["batch_size"], call["strategy"]), {})
            own[tuple(call["prompts"])] = (call["new_tokens"], call["row_steps"], call["seconds"])
        # Fine-tuned models have a baseline of their own.
        baselines = {(row["batch_size"], row["strategy"]): row["baseline"] for row in data["runs"]}
        for (size, strategy), calls in groups.items():
            baseline = baselines[size, strategy]
            if strategy == baseline:
                continue
            plain = groups.get((size, baseline), {})
            if not plain.keys() >= calls.keys():
                raise ValueError(f"{str(folder)!r} has no {baseline!r} of the same prompts.")
            name = strategy if len(folders) == 1 else f"{folder.name} {strategy}"
            both = {key: (*sums, *plain[key]) for key, sums in calls.items()}
            found.append(Measured(name, size, both))
    return found


def tau(*sums: Any) -> Any:
    return sums[0] / sums[1]


def speedup(*sums: Any) -> Any:
    return sums[0] / sums[2] / (sums[3] / sums[5])


def beside(one: Measured, other: Measured) -> tuple[list[Any], list[Any]]:
    """Difference of tau and ratio of speedups, each with its interval, on the common prompts.

    Raises:
        ValueError: they have no prompts in common.
    """
    keys = sorted(one.calls.keys() & other.calls.keys())
    if not keys:
        raise ValueError(f"{one.name!r} and {other.name!r} have answered different prompts.")
    columns = [*zip(*(one.calls[key] + other.calls[key] for key in keys))]
    sums = list(map(sum, columns))
    figures = []
    for figure in (
        lambda *s: tau(*s[:6]) - tau(*s[6:]),
        lambda *s: speedup(*s[:6]) / speedup(*s[6:]),
    ):
        figures.append([figure(*sums), interval(figure, *columns)])
    return figures[0], figures[1]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="outputs of hf-spec bench")
    parser.add_argument("--against", help="name of the contender that others are compared with")
    args = parser.parse_args(given)
    try:
        show(read(args.folders), args.against)
    except ValueError as error:
        parser.error(first_line(error))


def show(found: list[Measured], against: str | None) -> None:
    """Print the table.

    Raises:
        ValueError: there is no such contender, or one has answered other prompts.
    """
    named = [one for one in found if against in (None, one.name)]
    if not named:
        names = ", ".join(sorted({one.name for one in found}))
        raise ValueError(f"--against {against}: there is no such contender, only {names}")
    heads = (
        "contender", "batch", "prompts", "tau", "speedup", "tau beside", "95%", "speed beside",
        "95%",
    )  # fmt: skip
    rows = []
    for one in found:
        sums = list(map(sum, zip(*one.calls.values())))
        row = [
            one.name, str(one.batch_size), str(sum(map(len, one.calls))),
            f"{tau(*sums):.2f}", f"{speedup(*sums):.2f}x",
        ]  # fmt: skip
        base = next((b for b in named if b.batch_size == one.batch_size), None)
        if base is not None and base is not one:
            for (value, ends), form in zip(beside(one, base), ("+.2f", ".2f")):
                row += [
                    f"{value:{form}}",
                    f"{ends[0]:{form}} to {ends[1]:{form}}" if ends else "too few",
                ]
        rows.append([*row, *[""] * (len(heads) - len(row))])
    print(f"beside {named[0].name}\n{aligned(heads, rows)}")


if __name__ == "__main__":
    main()
