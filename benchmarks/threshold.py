"""The threshold of ``layer_skip``'s adaptive exit while decoding (Draft & Verify, Figure 5).

``python benchmarks/threshold.py --model M --adapter A --prompts NAME.jsonl [NAME2.jsonl ...]``: for
each file of prompts a line of the plot, from a freshly loaded model, so that nothing is carried
over. The released code's settings, without look-ups; every step drafts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measured
import torch
from matplotlib.figure import Figure

import hf_spec
from hf_spec.files import replacing
from hf_spec.tools.bench.prompts import encode, read_prompts
from hf_spec.tools.loading import load_model

EXIT = {"draft_exit": "adaptive", "drafting": "always", "lookup": False}


def trajectory(args: argparse.Namespace, prompts: Path) -> tuple[list[int], list[float], float]:
    """Drafting stages so far and the threshold after each prompt, and the share accepted."""
    model, tokenizer = load_model(args.model, args.dtype, None)
    model.load_adapter(args.adapter)
    options = {**EXIT, "threshold": args.first, "target_acceptance": args.target}
    stages, values, drafted, accepted = [0], [args.first], 0, 0
    for prompt in read_prompts(prompts):
        ids = torch.tensor([encode(tokenizer, prompt.text, prompt.history)])
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.max_new_tokens,
            do_sample=False, assistant_strategy="layer_skip", assistant_kwargs=options,
        )  # fmt: skip
        stats: Any = hf_spec.last_stats(model)
        stages.append(stages[-1] + stats.num_row_steps - 1)
        values.append(stats.details["threshold"])
        drafted += stats.num_drafted_tokens
        accepted += sum(stats.accepted.values())
        if stages[-1] >= args.stages:
            break
    return stages, values, accepted / max(drafted, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = measured.parser(
        __doc__, ["model"], output=Path("threshold.svg"), max_new_tokens=96, dtype="bfloat16",
        threads=None,
    )  # fmt: skip
    parser.add_argument("--adapter", required=True, help="a trained layer_skip adapter")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--first", type=float, default=0.4, help="the threshold at the start")
    parser.add_argument("--target", type=float, default=0.85, help="acceptance rate to reach")
    parser.add_argument("--stages", type=int, default=5000, help="drafting stages of each line")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.add_subplot(xlabel="drafting stages", ylabel="threshold γ", ylim=(0, 1))
    for prompts in args.prompts:
        stages, values, share = trajectory(args, prompts)
        axes.plot(stages, values, label=f"{prompts.stem}: {share:.0%} accepted")
        for tenth in range(11):
            place = max(i for i, at in enumerate(stages) if at <= stages[-1] * tenth / 10)
            print(f"{prompts.stem}: {stages[place]} stages, threshold {values[place]:.2f}")
        print(f"{prompts.stem}: {share:.1%} of drafted tokens accepted")
    axes.legend()
    with replacing(args.output) as temporary:
        figure.savefig(temporary, format="svg")


if __name__ == "__main__":
    main()
