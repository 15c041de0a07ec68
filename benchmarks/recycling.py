"""How ``token_recycling`` drafts by what its papers vary: tau of each line of a table.

``python benchmarks/recycling.py TABLE ... --model M --prompts P.jsonl``; without TABLE it lists the
tables. Every step drafts. Lines share nothing learned; within a line, prompts come in order. Tau,
which counts the prompt's forward, does not depend on how busy the machine is; samples in turn have
a column each behind the mean. What ``--output`` (a JSON file) has already is not measured again, so
a command that was interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import measured
import torch

import hf_spec
from hf_spec.core.stats import SpecStats
from hf_spec.files import read_json, write_json
from hf_spec.predict import recycling
from hf_spec.predict.recycling import (
    MAX_NODES,
    RecyclingPredictor,
    SuccessorTable,
    learned_table,
)
from hf_spec.threads import forget
from hf_spec.tools.bench.prompts import encode_prompts, read_prompts, spread
from hf_spec.tools.loading import load_model


class Line(NamedTuple):
    """A line of a table. From ``weights`` on nothing is an option of the strategy."""

    name: str
    options: dict[str, Any]
    strategy: str = "token_recycling"
    #: Of entries of contexts of one, two and three tokens.
    weights: tuple[float, float, float] | None = None
    #: Whether nothing is entered at rejected draft tokens.
    accepted_only: bool = False
    #: How many successors each entry has.
    successors: int | None = None
    #: Whether answers of an epoch before draft, after a change of the weights.
    history: bool = False
    #: Samples of each prompt one after the other, from a table that is empty at the first.
    in_turn: int | None = None
    #: Whether the sample's random numbers choose what is drafted.
    stochastic: bool = True


def _drafts(nodes: int, **options: Any) -> dict[str, Any]:
    return {"num_draft_tokens": nodes, "lookup": False, **options}


#: The longest known context counts.
LONGEST = (1e-8, 1e-4, 1.0)
LOOKUPS = Line("lookups alone", {}, "prompt_lookup")
#: A table of each call, and one for all calls.
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (("cold", {"keep_table": False}), ("kept", {}))
#: By how much weights change between epochs, as by a step of Adam.
CHANGE = 1e-6
TABLES = {
    "contexts": (
        Line("one token (Token Recycling)", _drafts(15), weights=(1.0, 0.0, 0.0)),
        Line("the longest known of one to three (STAND)", _drafts(15), weights=LONGEST),
        Line("all averaged", _drafts(15)),
        Line("the same, accepted nodes only", _drafts(15), accepted_only=True),
        LOOKUPS,
    ),
    "successors": tuple(Line(f"k = {k}", _drafts(15), successors=k) for k in (2, 4)),
    "nodes": tuple(
        Line(f"{nodes} nodes, {name}", _drafts(nodes, lookup=True, **options))
        for nodes in (7, 15, 31, 63)
        for name, options in CALLS
    ),
    "fewer": tuple(
        Line(f"31 nodes, k = 4, {name}", _drafts(31, lookup=True, **options), successors=4)
        for name, options in CALLS
    ),
    "samples": (
        LOOKUPS._replace(name="lookups alone, 4 in turn", in_turn=4),
        Line("one token, 4 in turn", _drafts(15), weights=(1.0, 0.0, 0.0), in_turn=4),
        Line("longest, 4 in turn, likeliest drafted", _drafts(15), weights=LONGEST,
             in_turn=4, stochastic=False),
        Line("longest, 4 in turn (STAND)", _drafts(15), weights=LONGEST, in_turn=4),
        Line("all averaged, 4 in turn, likeliest drafted", _drafts(15), in_turn=4,
             stochastic=False),
        *(Line(f"all averaged, {n} in turn", _drafts(15), in_turn=n) for n in (1, 4, 8)),
    ),
    "tables": (
        Line("no table", _drafts(31, lookup=True)),
    ),
    "rollouts": (
        LOOKUPS,
        Line("`token_recycling`", _drafts(7, lookup=True)),
        Line("answers of the epoch before", {}, "plain", history=True),
        Line("both", _drafts(7, lookup=True), history=True),
    ),
}  # fmt: skip


@contextmanager
def changed(line: Line) -> Iterator[None]:
    """Tables are what a line says."""
    learn, enter = SuccessorTable.learn, SuccessorTable._learn
    levels = RecyclingPredictor.levels

    def learn_accepted(self: Any, before: Any, found: Any, rank: Any) -> None:
        learn(self, before, found, torch.where(rank < MAX_NODES, -1, rank))

    def enter_few(self: Any, contexts: Any, following: Any, log_probs: Any, ranks: Any) -> None:
        left_out = torch.arange(log_probs.shape[-1]) >= line.successors
        enter(self, contexts, following, log_probs.masked_fill(left_out, -torch.inf), ranks)

    def likeliest_levels(self: Any, root: Any, depth: int, width: int, noise: Any) -> Any:
        return levels(self, root, depth, width, None)

    with ExitStack() as changes:
        if line.weights is not None:
            changes.enter_context(patch.object(recycling, "WEIGHTS", line.weights))
        if line.accepted_only:
            changes.enter_context(patch.object(SuccessorTable, "learn", learn_accepted))
        if not line.stochastic:
            changes.enter_context(patch.object(RecyclingPredictor, "levels", likeliest_levels))
        if line.successors is not None:
            changes.enter_context(patch.object(SuccessorTable, "_learn", enter_few))
        yield


def tau(model: Any, prompts: Sequence[Sequence[int]], line: Line, args: Any) -> list[float]:
    """Mean tokens per step of each sequence, over all prompts; behind it those of each turn."""
    sampling: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0}
    options = dict(line.options)
    if line.strategy != "plain":
        options["drafting"] = "always"
    if line.history:
        options["history"] = hf_spec.RolloutHistory()

    def epoch() -> list[float]:
        total, turns = SpecStats(), [SpecStats() for _ in range(line.in_turn or 0)]
        for prompt, turn in product(prompts, range(line.in_turn or 1)):
            table = learned_table(model)
            if line.in_turn and turn == 0 and table is not None:
                table.clear()
            ids = torch.tensor([prompt] * args.samples)
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.max_new_tokens,
                assistant_strategy=line.strategy, assistant_kwargs=options, **sampling,
            )  # fmt: skip
            stats: Any = hf_spec.last_stats(model)
            total.merge(stats)
            if turns:
                turns[turn].merge(stats)
        return [one.tau for one in (total, *turns)]

    forget(model)
    torch.manual_seed(0)
    with changed(line):
        if not line.history:
            return epoch()
        epoch()
        before = {name: one.clone() for name, one in model.named_parameters()}
        with torch.no_grad():
            for one in model.parameters():
                one += CHANGE * torch.randn_like(one).sign()
        found = epoch()
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.copy_(before[name])
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = measured.parser(
        __doc__, [], model=None, prompts=None, limit=None, output=Path("recycling.json"),
        max_new_tokens=64, dtype="float32", threads=None, adapter=[],
    )  # fmt: skip
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--nodes", type=int, nargs="+", default=[31], help="of --adapter's lines")
    parser.add_argument("--samples", type=int, default=1, help="of each prompt, in one batch")
    parser.add_argument("--temperature", type=float, help="default: greedy")
    args = parser.parse_args(arguments)
    if not args.tables or args.model is None or args.prompts is None:
        print(*(f"{name}: {len(lines)} lines" for name, lines in TABLES.items()), sep="\n")
        return
    if "samples" in args.tables and not args.temperature:
        parser.error("samples needs --temperature")
    if args.threads:
        torch.set_num_threads(args.threads)
    lines = [line for name in args.tables for line in TABLES[name]]
    lines += [
        Line(f"{nodes} nodes, {Path(place).name}", _drafts(nodes, lookup=True, adapter=place))
        for place, nodes in product(args.adapter, args.nodes)
    ]
    model, tokenizer = load_model(args.model, args.dtype)
    texts = spread(read_prompts(args.prompts), args.limit)
    prompts, _ = encode_prompts(model, tokenizer, texts, args.max_new_tokens)
    found = read_json(args.output) if args.output.is_file() else {}
    for line in lines:
        if line.name not in found:
            found[line.name] = tau(model, prompts, line, args)
            write_json(args.output, found)
        print(f"| {line.name} |", *(f"{one:.2f} |" for one in found[line.name]), flush=True)


if __name__ == "__main__":
    main()
