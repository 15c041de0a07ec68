"""The data of the demo: sources of Transformers for the training of its model, and its prompts.

``python benchmarks/demo_data.py`` writes ``hf_spec/tools/demo/prompts.jsonl`` from the installed
Transformers (5.24 for the shipped file; its license is Apache-2.0, as ours): beginnings of classes
of models whose code the demo model has never seen. As many models of Transformers are much alike,
much of this code is like code that it has seen.
"""

from __future__ import annotations

import ast
import json
from bisect import bisect_right
from collections.abc import Callable
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path

from hf_spec.files import write_atomically
from hf_spec.tools.demo.demo import PROMPTS, model_folder

#: Models whose files are kept out of the training data; the demo takes its prompts from them.
HELD_OUT = (
    "bert", "clip", "falcon", "gemma3", "gpt_neox", "mamba",
    "olmo3", "phi3", "qwen3", "t5", "vit", "whisper",
)  # fmt: skip

#: A prompt ends at the last line that keeps it within this many tokens.
PROMPT_TOKENS = 320
#: Shorter beginnings (tiny modules, tables cut off by a long line) are left out.
MIN_TOKENS = 120


def modeling_files(held_out: bool = False) -> list[Path]:
    """``modeling_*.py`` of Transformers: of the held-out models, or of all the others, sorted."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None  # a requirement of this package
    paths = sorted(Path(spec.origin).parent.glob("models/*/modeling_*.py"))
    return [path for path in paths if (path.parent.name in HELD_OUT) == held_out]


def read_source(path: Path) -> str:
    """The text of a source file without the comments at its beginning, which are its license."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return "".join(dropwhile(lambda line: line.startswith("#") or not line.strip(), lines))


def demo_prompts(count_tokens: Callable[[str], int]) -> list[dict[str, str]]:
    """Two prompts per held-out file: classes that begin at about a third, and at two thirds of it.

    The order alternates so that the first few prompts already come from different files.

    Args:
        count_tokens: number of tokens of a text.
    """
    found = []
    sources = {path.name: read_source(path) for path in modeling_files(held_out=True)}
    for third in (1, 2):
        for name, source in sources.items():
            lines = source.splitlines(keepends=True)
            start = _class_near(source, third * len(lines) // 3)
            taken = _beginning(lines[start:], count_tokens)
            if taken:
                text = "".join(lines[start : start + taken])
                place = f"{name}, line {start + 1}"
                found.append({"prompt": text, "category": "code", "question_id": place})
    return found


def _class_near(source: str, line: int) -> int:
    """Index of the line of the class nearest to a line; 0 if none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return 0
    starts = [node.lineno - 1 for node in tree.body if isinstance(node, ast.ClassDef)]
    return min(starts, key=lambda start: abs(start - line), default=0)


def _beginning(lines: list[str], count_tokens: Callable[[str], int]) -> int:
    """Number of lines that fit into ``PROMPT_TOKENS``; 0 if that is too little to go on."""
    lengths = range(1, min(len(lines), PROMPT_TOKENS) + 1)
    fitting = bisect_right(lengths, PROMPT_TOKENS, key=lambda n: count_tokens("".join(lines[:n])))
    text = "".join(lines[:fitting])
    # A beginning that takes all lines leaves nothing to write.
    return fitting if fitting < len(lines) and count_tokens(text) >= MIN_TOKENS else 0


if __name__ == "__main__":
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    found = demo_prompts(lambda text: len(tokenizer(text, verbose=False)["input_ids"]))
    write_atomically(PROMPTS, "\n".join(map(json.dumps, found)))
