"""Long prompts on this machine: ``python benchmarks/contexts.py --model M --lengths 1000 8000``.

Each strategy writes on behind the same prompt, one of ``long_prompts.py``, in a process of its own,
whose peak of memory counts. Prompts run in parts of 2,048 tokens. Strategies take turns.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import long_prompts
import torch

import hf_spec
from hf_spec.tools.loading import load_model

#: Of the parts that a prompt runs in.
CHUNK = 2048


class Clock:
    """A streamer that notes when tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def measure(model: str, length: int, strategy: str, adapter: str | None, tokens: int) -> str:
    """The row of a strategy; ``transformers`` is plain ``generate``."""
    loaded, tokenizer = load_model(model, "native")
    (prompt, *_) = long_prompts.prompts(tokenizer, [length], 1)
    if adapter is not None and strategy not in ("transformers", "prompt_lookup", "plain"):
        loaded.load_adapter(adapter)
    inputs = tokenizer(prompt["prompt"], return_tensors="pt")
    options = {} if strategy == "transformers" else {"assistant_strategy": strategy}
    clock, begin = Clock(), time.perf_counter()
    loaded.generate(
        **inputs, **options, streamer=clock, max_new_tokens=tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0, prefill_chunk_size=CHUNK,
    )  # fmt: skip
    first, last = clock.times[1], clock.times[-1]  # the prompt itself comes first
    stats = hf_spec.last_stats(loaded) if options else None
    steps = tokens - 1 if stats is None else stats.num_steps - 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"| {inputs.input_ids.shape[1]:,} | {strategy} | {first - begin:.1f} | "
        f"{1000 * (last - first) / steps:.0f} | {(tokens - 1) / steps:.2f} | "
        f"{(tokens - 1) / (last - first):.1f} | {peak:.2f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", help="for the strategies that draft with one")
    parser.add_argument("--strategies", nargs="+", default=["transformers", "prompt_lookup"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--row", nargs=2, metavar=("LENGTH", "STRATEGY"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    if given.row is not None:
        length, strategy = given.row
        tokens = given.new_tokens
        print(measure(given.model, int(length), strategy, given.adapter, tokens), flush=True)
        return
    heads = "tokens", "", "prompt, s", "ms a step", "tau", "tokens/s", "peak, GiB"
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}", flush=True)
    again = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments)]
    for length in given.lengths:
        for strategy in given.strategies * given.rounds:
            subprocess.run([*again, "--row", str(length), strategy], check=True)


if __name__ == "__main__":
    main()
