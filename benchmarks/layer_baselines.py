"""Baselines of Draft & Verify beside the layers that ``hf-spec search`` has found.

    python benchmarks/layer_baselines.py MODEL SKIP PROMPTS.jsonl OUTPUT [--limit 16]

SKIP is the folder of the search. Measures first, middle, last and random choices of equally many
sublayers (appendix D), in turns with plain decoding, drafting at every step with the paper's
adaptive exit. Writes results.json to OUTPUT and prints a table. Use prompts that the search has not
seen. The paper's draft exits are in ``papers.py layer-skip-exits``.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.files import read_json
from hf_spec.tools.bench.contenders import contender_of
from hf_spec.tools.bench.environment import environment_of
from hf_spec.tools.bench.prompts import read_prompts, spread
from hf_spec.tools.bench.results import write_results
from hf_spec.tools.bench.runner import run
from hf_spec.tools.loading import load_model
from hf_spec.tools.search import STRATEGY, TRIAL_OPTIONS, Choice, skippable

#: Seeds of random choices.
SEEDS = range(3)


def choices(sublayers: Choice, searched: Choice) -> Iterator[tuple[str, Choice]]:
    """The searched choice, then as many attentions and MLPs chosen by position."""

    def chosen(pick: Callable[[Sequence[int], int], Sequence[int]]) -> Choice:
        return {kind: sorted(pick(sublayers[kind], len(searched[kind]))) for kind in sublayers}

    yield "searched", searched
    yield "first", chosen(lambda layers, n: layers[:n])
    yield "middle", chosen(lambda layers, n: layers[(len(layers) - n) // 2 :][:n])
    yield "last", chosen(lambda layers, n: layers[len(layers) - n :])
    for seed in SEEDS:
        yield f"random {seed}", chosen(random.Random(seed).sample)


def main(model: str, skip: Path, prompts: Path, output: Path, limit: int) -> None:
    """Measure and write."""
    config: Any = SpecPeftConfig.from_pretrained(str(skip))
    searched = {"skip_attention": config.skip_attention, "skip_mlp": config.skip_mlp}
    new_tokens = read_json(skip / "search.json")["identity"]["max_new_tokens"]
    loaded, tokenizer = load_model(model, "bfloat16")
    lineup = [
        contender_of(f"{STRATEGY}:{name}", {**choice, **TRIAL_OPTIONS})
        for name, choice in choices(skippable(loaded), searched)
    ]
    chosen = spread(read_prompts(prompts), limit)
    result = run(loaded, tokenizer, chosen, lineup, max_new_tokens=new_tokens)
    output.mkdir(parents=True, exist_ok=True)
    write_results(output / "results.json", result, environment_of(loaded, model, prompts))
    for row in result.rows:
        if row["task"] == "all":
            print(f"{row['strategy']:30} {row['speedup']:.2f}x  tau {row['tau']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("model", str), ("skip", Path), ("prompts", Path), ("output", Path)):
        parser.add_argument(name, type=kind)
    parser.add_argument("--limit", type=int, default=16)
    main(**vars(parser.parse_args()))
