"""The papers' tables on a model of your own: ``python benchmarks/papers.py TABLE ... --model M``.

For each line of a table: an adapter in the paper's settings (no Markov head,
drafts of all tokens), trained with ``hf-spec train`` for each seed, and one ``hf-spec bench`` in a
process of its own, so that lines share nothing learned. Every step drafts, without look-ups, unless
the method sizes its trees by measured times. The last output is the table, with paired intervals
against its first line (``compare.py``). What exists in ``--output`` is not made again, so a command
that was interrupted goes on, and tables share adapters. Without TABLE it lists the tables.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import measured
from compare import main as compare
from transformers import AutoConfig

from hf_spec.files import read_json

#: The papers' adapters: each distance predicted for itself, over the whole vocabulary.
PAPER = "--markov-rank 0 --draft-vocab-size 0"
ALWAYS = {"drafting": "always", "lookup": False}


class Line(NamedTuple):
    """A line of a table: what is trained, and how it decodes."""

    name: str
    #: Method and options of ``hf-spec train``.
    adapter: str
    #: Options of the strategy.
    options: dict[str, Any] = {}
    #: Options of ``hf-spec bench``.
    bench: str = ""


class Table(NamedTuple):
    source: str
    lines: tuple[Line, ...]
    batch_sizes: str = "1"


def _bita(name: str, tree: str, top_k: int | None = None, adapter: str = "bita") -> Line:
    width = {} if top_k is None else {"top_k": top_k}
    return Line(name, adapter, {"tree": tree, **width, **ALWAYS})


def _ppd(name: str, options: str = "") -> Line:
    return Line(name, f"ppd {options}".strip(), {"tree": "static", **ALWAYS})


def _skip(name: str, **options: Any) -> Line:
    return Line(
        name,
        "layer_skip --draft-rank 32 --num-train-epochs 8 --skip-attention {skip} --skip-mlp {skip}",
        {"draft_exit": "threshold", **options, **ALWAYS},
    )  # fmt: skip


def _propd(name: str, tree: str, prune: bool) -> Line:
    # The policy sizes online trees, and takes plain steps only where drafting costs more.
    drafting = {} if tree == "online" else {"drafting": "always"}
    return Line(name, "propd", {"tree": tree, "prune": prune, "lookup": False, **drafting})


def _pruned(layer: int, top_k: int) -> Line:
    return Line(
        f"layer{layer}-k{top_k}", "propd" if layer == 4 else f"propd --prune-layer {layer}",
        {"num_draft_tokens": 63, "prune": True, "prune_top_k": top_k, **ALWAYS},
    )  # fmt: skip


SAMPLED = "--do-sample --temperature 1.0 --top-k 10 --top-p 0.95"
SPACE = "space --update full --shared-mask true --num-mask-tokens 5 --dtype float32"

TABLES = {
    "bita-prompts": Table(
        "BiTA, Table 3: kinds of prompts",
        (
            _bita("deep", "efficient", 5),
            *(
                _bita(depth, "efficient", 5, f"bita --prompt-depth {depth}")
                for depth in ("shallow", "none")
            ),
        ),
    ),
    "bita-trees": Table(
        "BiTA, Table 4: kinds of trees",
        (
            _bita("efficient5", "efficient", 5), _bita("efficient3", "efficient", 3),
            _bita("efficient2", "efficient", 2), _bita("straightforward", "straightforward"),
            _bita("full1", "chain"), *(_bita(f"full{k}", "full", k) for k in (2, 3, 4)),
        ),
    ),
    "bita-prompt-tokens": Table(
        "BiTA, Figure 8: number of prompt tokens",
        (
            _bita("16", "efficient", 2),
            *(_bita(f"{n}", "efficient", 2, f"bita --num-prompt-tokens {n}") for n in (1, 4, 64)),
        ),
    ),
    "bita-mask-tokens": Table(
        "BiTA, Figure 9: number of mask tokens",
        (
            _bita("3", "efficient", 2),
            *(_bita(f"{n}", "efficient", 2, f"bita --num-mask-tokens {n}") for n in (1, 2, 4, 5)),
        ),
    ),
    "methods": Table(
        "BiTA, Figure 7, and PPD, Table 6.1: methods beside each other",
        (
            Line("medusa", "medusa", {"tree": "sparse", **ALWAYS}),
            _bita("bita", "efficient", 2), _ppd("ppd"),
        ),
    ),
    "space-k": Table(
        "SPACE, Figure 6: number of mask tokens used",
        tuple(
            Line(f"k{k}", SPACE, {"tree": "chain", "max_depth": k, **ALWAYS})
            for k in (5, 1, 2, 3, 4)
        ),
    ),
    "space-sampling": Table(
        "SPACE, Table 5: sampling",
        (
            Line("greedy", SPACE, {"tree": "chain", **ALWAYS}),
            Line("match", SPACE, {"tree": "chain", **ALWAYS}, SAMPLED),
            Line(
                "rejection", SPACE, {"tree": "chain", "acceptance": "rejection", **ALWAYS}, SAMPLED
            ),
        ),
    ),
    "layer-skip-exits": Table(
        "Draft & Verify, Tables 3, 4 and 10: when drafting stops",
        (
            _skip("adaptive", draft_exit="adaptive"),
            *(_skip(f"fixed{k}", draft_exit="fixed", num_draft_tokens=k) for k in (2, 4, 6, 8)),
            *(_skip(f"threshold{t}", threshold=t) for t in (0.2, 0.4, 0.6, 0.8)),
            *(
                _skip(f"adaptive-max{k}", draft_exit="adaptive", num_draft_tokens=k)
                for k in (10, 14, 18)
            ),
        ),
    ),
    "ppd-ept": Table(
        "PPD, Table 6.4: number of EPTs",
        (_ppd("1"), *(_ppd(f"{n}", f"--num-ept {n}") for n in (2, 5))),
    ),
    "ppd-training": Table(
        "PPD, Tables 6.5 and 6.6: loss, prefix tuning",
        (
            _ppd("distillation"), _ppd("hard", "--loss hard"),
            _ppd("prefix", "--num-prefix-tokens 1"),
        ),
    ),
    "ppd-head": Table(
        "PPD, Table 6.7: a head of their own",
        (
            _ppd("none"),
            *(
                _ppd(f"{kind}-{stages}", f"--head {kind} --head-stages {stages}")
                for kind in ("vocabulary", "residual")
                for stages in (1, 2)
            ),
        ),
    ),
    "ppd-masks": Table(
        "PPD, Tables 6.8 and 6.9: masks and weights of EPTs",
        (
            _ppd("ensemble", "--num-ept 4"),
            *(_ppd(mask, f"--num-ept 4 --ept-mask {mask}") for mask in ("decoder", "encoder")),
            _ppd("learned", "--num-ept 4 --ept-aggregation learned"),
        ),
    ),
    "ppd-exits": Table(
        "PPD, Table 6.10: several exits",
        (_ppd("1"), *(_ppd(f"{n}", f"--num-exits {n}") for n in (2, 3))),
    ),
    "propd-pruning": Table(
        "ProPD, Table 2: layer and k",
        (
            Line("whole", "propd", {"num_draft_tokens": 63, "prune": False, **ALWAYS}),
            *(_pruned(layer, k) for layer in (1, 2, 3, 4) for k in (50, 100, 200)),
        ),
        "4",
    ),
    "propd-ablation": Table(
        "ProPD, Tables 1 and 3, Figure 7: pruning and dynamic trees",
        (
            _propd("neither", "sparse", False), _propd("pruning", "sparse", True),
            _propd("dynamic", "online", False), _propd("both", "online", True),
            _propd("bpd", "chain", False),
        ),
        "1,2,4,8,16",
    ),
}  # fmt: skip


def train(line: Line, seed: int, args: argparse.Namespace) -> Path:
    """The folder of the line's adapter, trained unless it is there."""
    name = re.sub(r"[^a-z0-9]+", "-", line.adapter.replace("{skip}", "").lower()).strip("-")
    folder = args.output / "adapters" / f"{name}-seed{seed}"
    layers = AutoConfig.from_pretrained(args.model).num_hidden_layers
    # Three quarters are left out, as in Draft & Verify's Table 9.
    skip = json.dumps([*range(1, 1 + layers * 3 // 4)], separators=(",", ":"))
    method, *options = shlex.split(line.adapter.replace("{skip}", skip))
    paper = shlex.split("" if method == "layer_skip" else PAPER)
    return measured.train(folder, args, method, *options, *paper, "--seed", str(seed))


def measure(name: str, line: Line, seed: int, batch_sizes: str, args: argparse.Namespace) -> Path:
    """The folder of the line's results, measured unless they are there."""
    folder: Path = args.output / name / f"{line.name}-seed{seed}"
    strategy = line.adapter.split()[0]
    words = measured.words_of(
        args, [strategy], [train(line, seed, args)], "--batch-size", batch_sizes,
        "--strategy-kwargs", f"{strategy}={json.dumps(line.options)}", *shlex.split(line.bench),
    )  # fmt: skip
    measured.bench(folder, words)
    return folder


def accuracies(folder: Path) -> str:
    """Top-1 and top-10 accuracy at each distance, of the adapter's best checkpoint."""
    best = read_json(folder / "training.json")["best"]
    shown = []
    for k in (1, 10):
        found = [best[key] for key in sorted(best) if key.startswith(f"eval_top{k}_")]
        if found:
            shown.append(f"top-{k} " + ", ".join(f"{value:.2f}" for value in found))
    return "; ".join(shown)


def main(given: list[str] | None = None) -> None:
    parser = measured.parser(
        __doc__, [], model=None, answers=None, prompts=None, output=Path("papers"), limit=32,
        max_new_tokens=96, dtype="bfloat16", threads=1,
    )  # fmt: skip
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="one or several; or none")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each adapter")
    args = parser.parse_args(given)
    unknown = [name for name in args.tables if name not in TABLES]
    if unknown:
        parser.error(f"there is no table {unknown[0]!r}, only {', '.join(TABLES)}")
    if not args.tables:
        for name, table in TABLES.items():
            print(f"{name:20} {table.source}")
        return
    if args.model is None or args.prompts is None:
        parser.error("--model and --prompts are needed to measure a table")
    for name in args.tables:
        table = TABLES[name]
        # A seed after the other: an interrupted run has whole tables.
        folders = [
            measure(name, line, seed, table.batch_sizes, args)
            for seed in range(args.seeds)
            for line in table.lines
        ]
        print(f"\n{table.source}")
        for adapter in dict.fromkeys(
            train(line, seed, args) for line in table.lines for seed in range(args.seeds)
        ):
            print(f"{adapter.name}: {accuracies(adapter)}")
        compare([*map(str, folders)])


if __name__ == "__main__":
    main()
