"""Answer files of Spec-Bench (https://github.com/hemingkx/Spec-Bench), for its ``speed.py``.

    python benchmarks/spec_bench.py --model M --prompts question.jsonl --output answers.jsonl \\
        --strategies prompt_lookup [--adapter DIR ...]

measures as ``hf-spec bench`` does, at batch size 1, and writes a file for each strategy, plain
decoding included: ``answers-prompt_lookup.jsonl``.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from pathlib import Path

import measured

from hf_spec.files import write_atomically
from hf_spec.tools.bench.contenders import contenders, parse_names
from hf_spec.tools.bench.prompts import read_prompts, spread
from hf_spec.tools.bench.results import BenchResult, Measurement
from hf_spec.tools.bench.runner import run
from hf_spec.tools.loading import load_model, read_adapters


def accept_lengths(item: Measurement) -> list[int]:
    """Number of tokens emitted by each step, of which Spec-Bench takes the mean.

    The mean is exact; the order is unknown. Stock strategies report only the number of steps, over
    which their tokens are divided evenly.
    """
    if item.stats is not None:
        histogram = sorted(item.stats.accepted_histogram.items())
        return [length for length, count in histogram for _ in range(count)]
    each, rest = divmod(item.new_tokens, max(item.row_steps, 1))
    return [each + 1] * rest + [each] * (item.row_steps - rest)


def write_answers(path: Path, result: BenchResult, tokenizer, model_id: str) -> list[Path]:
    """Write the file of each contender, and return the paths."""
    answers: dict[str, list[str]] = {}
    for item in result.measurements:
        prompt, tokens = result.prompts[item.prompts[0]], item.rows[0]
        choice = {
            "index": 0,
            "turns": [tokenizer.decode(tokens, skip_special_tokens=True)],
            "decoding_steps": [item.row_steps],
            "new_tokens": [len(tokens)],
            "wall_time": [item.seconds],
            "accept_lengths": accept_lengths(item),
        }
        answer = {
            "question_id": prompt.question_id, "category": prompt.category,
            "answer_id": uuid.uuid4().hex, "model_id": f"{model_id}-{item.strategy}",
            "choices": [choice], "tstamp": time.time(),
        }  # fmt: skip
        answers.setdefault(item.strategy, []).append(json.dumps(answer))
    paths = []
    for strategy, lines in answers.items():
        safe = re.sub(r"[^\w.@-]+", "_", strategy)
        paths.append(path.with_name(f"{path.stem}-{safe}.jsonl"))
        write_atomically(paths[-1], "\n".join(lines))
    return paths


def main(arguments: list[str] | None = None) -> None:
    parser = measured.parser(
        __doc__, ["model", "prompts", "output"], adapter=[], dtype="bfloat16",
        max_new_tokens=128, limit=None,
    )  # fmt: skip
    parser.add_argument("--strategies", default="prompt_lookup", help="default: %(default)s")
    given = parser.parse_args(arguments)
    adapters = read_adapters(given.adapter)
    lineup = contenders(parse_names(given.strategies), adapters=adapters)
    model, tokenizer = load_model(given.model, given.dtype, adapters=adapters)
    prompts = spread(read_prompts(given.prompts), given.limit)
    result = run(model, tokenizer, prompts, lineup, max_new_tokens=given.max_new_tokens)
    for path in write_answers(given.output, result, tokenizer, given.model):
        print(path)


if __name__ == "__main__":
    main()
