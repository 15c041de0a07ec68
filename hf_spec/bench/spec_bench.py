"""Answer files in the format of Spec-Bench (``evaluation/eval.py``), for its ``speed.py``."""

from __future__ import annotations

import json
import re
import time
import uuid
from pathlib import Path
from typing import Any

from hf_spec.bench.results import BenchResult, Measurement
from hf_spec.files import write_atomically


def answer_path(path: Path, strategy: str) -> Path:
    """The file of one strategy: ``answers-prompt_lookup.jsonl`` for ``answers.jsonl``."""
    safe = re.sub(r"[^\w.@-]+", "_", strategy)
    return path.with_name(f"{path.stem}-{safe}{path.suffix or '.jsonl'}")


def write_answers(path: Path, result: BenchResult, tokenizer: Any, model_id: str) -> list[Path]:
    """Write an answer file for each strategy, plain decoding included.

    Only measurements at batch size 1 are written.

    Args:
        path: name of the files; see :func:`answer_path`.
        result: the measurements.
        tokenizer: decodes the answers.
        model_id: name of the model in the files.

    Returns:
        The paths of the files.
    """
    written = []
    for contender in result.contenders:
        own = [m for m in result.measurements if m.strategy == contender.name and m.batch_size == 1]
        lines = [json.dumps(_answer(result, item, tokenizer, model_id)) for item in own]
        if lines:
            target = answer_path(path, contender.name)
            write_atomically(target, "\n".join(lines))
            written.append(target)
    return written


def _answer(
    result: BenchResult, item: Measurement, tokenizer: Any, model_id: str
) -> dict[str, Any]:
    prompt, tokens = result.prompts[item.prompts[0]], item.rows[0]
    return {
        "question_id": prompt.question_id,
        "category": prompt.category,
        "answer_id": uuid.uuid4().hex,
        "model_id": f"{model_id}-{item.strategy}",
        "choices": [
            {
                "index": 0,
                "turns": [tokenizer.decode(tokens, skip_special_tokens=True)],
                "decoding_steps": [item.row_steps],
                "new_tokens": [len(tokens)],
                "wall_time": [item.seconds],
                "accept_lengths": _accept_lengths(item),
            }
        ],
        "tstamp": time.time(),
    }


def _accept_lengths(item: Measurement) -> list[int]:
    """Number of tokens emitted by each step.

    Spec-Bench uses their mean, which is exact; their order is unknown. Stock strategies report only
    the number of steps, over which their tokens are divided evenly.
    """
    if item.stats is not None:
        histogram = sorted(item.stats.accepted_histogram.items())
        return [length for length, count in histogram for _ in range(count)]
    each, rest = divmod(item.new_tokens, max(item.row_steps, 1))
    return [each + 1] * rest + [each] * (item.row_steps - rest)
