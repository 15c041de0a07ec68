"""A batch in which some rows copy and others write freely: draft sizes per row, and one for all.

``python benchmarks/mixed_batch.py --model M --prompts spec_bench.jsonl [--strategy medusa]
[--adapter A] [--batch-size 24] [--max-rows 8] [--rounds 4]``

Half of the prompts ask for a text word by word, half are those of the categories ``writing`` and
``roleplay``. Both ways generate the same batch in turns, each with what it has learned before, and
the outputs must be equal. Prints times, tokens per second, steps and tau of each turn, and the
ratio of the medians without the first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec.target.target import Target
from hf_spec.tools.bench.prompts import read_prompts


def prompts(path: str, count: int) -> list[str]:
    """So many prompts, every other one of which asks for a copy."""
    by: dict[str, list[str]] = {}
    for one in read_prompts(path):
        by.setdefault(one.category, []).append(one.text)
    half = -(-count // 2)
    texts, free = by["summarization"][:half], [*by["writing"], *by["roleplay"]][:half]
    copies = [f"Repeat this text word by word:\n\n{text[:500]}" for text in texts]
    return [one for pair in zip(copies, free) for one in pair][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--model", "--prompts"):
        parser.add_argument(name, required=True)
    parser.add_argument("--adapter")
    parser.add_argument("--strategy", default="token_recycling")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-rows", type=int, help="most at once; the others wait")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    chats = [[{"role": "user", "content": one}] for one in prompts(args.prompts, args.batch_size)]
    ids = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
    )
    options = {} if args.max_rows is None else {"max_rows": args.max_rows}
    models: dict[str, Any] = {}
    for way in ("per row", "one size"):  # each learns for itself
        models[way] = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        if args.adapter:
            models[way].load_adapter(args.adapter)
    unpads = Target.unpads
    taken: dict[str, list[float]] = {way: [] for way in models}
    given: dict[str, Any] = {}
    for turn in range(args.rounds):
        for way in [*models][:: -1 if turn % 2 else 1]:
            Target.unpads = unpads if way == "per row" else False
            began = time.perf_counter()
            given[way] = models[way].generate(
                **ids, max_new_tokens=args.max_new_tokens, min_new_tokens=args.max_new_tokens,
                do_sample=False, assistant_strategy=args.strategy, assistant_kwargs=options,
            )  # fmt: skip
            seconds = time.perf_counter() - began
            stats = hf_spec.last_stats(models[way])
            taken[way].append(seconds)
            rate = args.batch_size * args.max_new_tokens / seconds
            print(
                f"{turn} {way:8} {seconds:6.2f} s {rate:6.1f} tokens/s {stats.num_steps} steps, "
                f"tau {stats.tau:.2f}", flush=True,
            )  # fmt: skip
    one, other = (statistics.median(taken[way][1:] or taken[way]) for way in models)
    print(f"per row: {other / one:.2f} times the speed of one size")
    print("identical" if torch.equal(*given.values()) else "OUTPUTS DIFFER")


if __name__ == "__main__":
    main()
