"""Suites of prompts that the field measures acceptance on; knows names and files, no models."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hf_spec.core.checks import check_choice, explained
from hf_spec.tools.bench.prompts import Prompt, read_prompts
from hf_spec.tools.data import DEFAULT_CATEGORY

#: New tokens of an answer, and sizes of trees, unless the command says others.
NEW_TOKENS, NODES = 256, "8,60"
#: The categories of MT-Bench (Zheng et al., 2023), which Spec-Bench takes as one group.
MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
#: Those of Spec-Bench (Xia et al., "Unlocking Efficiency in Large Language Model Inference", 2024)
#: beside it, 80 prompts each.
OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")


class Suite(NamedTuple):
    """Prompts in groups of equal weight, whatever number each has.

    Attributes:
        dataset: on the Hub, as ``--prompts`` names it; empty if it is a file elsewhere.
        file: where that is.
        groups: the group of each category, whose other prompts are left out; empty if categories
            are the groups.
        fields: of a suite that is one group, those that tell its rows from others.
    """

    dataset: str = ""
    file: str = ""
    groups: Mapping[str, str] = {}
    fields: tuple[str, ...] = ()


SUITES = {
    "spec-bench": Suite(
        file="https://github.com/hemingkx/Spec-Bench/blob/main/data/spec_bench/question.jsonl",
        groups=dict.fromkeys(MT_BENCH, "mt_bench") | {name: name for name in OTHERS},
    ),
    "speed-bench": Suite("nvidia/SPEED-Bench/qualitative:test"),
    "mt-bench": Suite("philschmid/mt-bench:train", groups={name: name for name in MT_BENCH}),
    "humaneval": Suite("openai/openai_humaneval:test", fields=("prompt", "entry_point")),
    "gsm8k": Suite("openai/gsm8k/main:test", fields=("question", "answer")),
}


def place_of(name: str, prompts: str | Path | None) -> str | Path:
    """Where the prompts of a suite are read: those that are given, or its dataset. A ValueError if
    there is no such suite, or its file has to be given."""
    check_choice("--suite", name, SUITES)
    suite = SUITES[name]
    if prompts is None and not suite.dataset:
        raise ValueError(
            f"--suite {name} is in no dataset of the Hub: download {suite.file} and give it as "
            "--prompts FILE"
        )
    return prompts or suite.dataset


def suite_prompts(name: str, place: str | Path) -> list[Prompt]:
    """The prompts of a suite with all turns, each with its group as category. A ValueError if they
    cannot be read, or are those of something else."""
    suite = SUITES[name]
    with explained(f"--suite {name}; without a network, give a file as --prompts", ValueError):
        read = read_prompts(place, turns=True, fields=suite.fields)
    own = {} if suite.groups else {DEFAULT_CATEGORY: name}
    groups = [
        suite.groups.get(one.category) if suite.groups else own.get(one.category, one.category)
        for one in read
    ]
    found = [replace(one, category=group) for one, group in zip(read, groups) if group is not None]
    if not found:
        raise ValueError(
            f"{str(place)!r} has none of the categories of --suite {name}: "
            f"{', '.join(suite.groups)}"
        )
    return found


def protocol(name: str, place: str | Path, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What is recorded of a suite beside the settings of calls: JSON types. ``missing``: groups
    that the file has no prompts of."""
    suite, groups = SUITES[name], [*dict.fromkeys(one.category for one in prompts)]
    wanted = dict.fromkeys(suite.groups.values() if suite.groups else groups)
    return {
        "suite": name, "dataset": suite.dataset or suite.file, "groups": groups,
        "missing": [group for group in wanted if group not in groups],
        "weights": dict.fromkeys(groups, 1 / len(groups)),
        "lookup": False, "drafting": "always",
    }  # fmt: skip
