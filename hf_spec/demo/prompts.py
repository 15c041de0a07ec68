"""Prompts of the demo: beginnings of code that the demo model has never seen.

They come from the held-out modules of the running Python's standard library, so that nothing has to
be downloaded or shipped.
"""

from __future__ import annotations

import ast
import sysconfig
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

from hf_spec.bench.prompts import Prompt

#: Modules kept out of the training data; the demo takes its prompts from them.
HELD_OUT = (
    "bisect", "calendar", "colorsys", "configparser", "fractions", "heapq",
    "queue", "shlex", "statistics", "string", "textwrap", "zipapp",
)  # fmt: skip

#: Folders that are not library code (tests, tools, vendored wheels, generated tables).
EXCLUDED_PARTS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "ensurepip",
     "pydoc_data", "encodings", "__phello__", "__pycache__"}
)  # fmt: skip
#: A prompt ends at the last line that keeps it within this many tokens.
PROMPT_TOKENS = 320
#: Shorter beginnings (tiny modules, tables cut off by a long line) are left out.
MIN_TOKENS = 120


def library_files(held_out: bool = False) -> list[Path]:
    """Source files of the standard library: the held-out modules, or all the others, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    own = [root / f"{name}.py" for name in HELD_OUT]
    if held_out:  # without a walk through all that is installed
        return [path for path in own if path.is_file()]
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not EXCLUDED_PARTS & {*path.relative_to(root).parts}
        and not path.name.startswith("_sysconfigdata")
        and path not in own
    ]


def demo_prompts(count_tokens: Callable[[str], int]) -> list[Prompt]:
    """Two prompts per held-out module: its beginning, and code from its middle.

    A prompt's reference is what follows it in the module. The order alternates so that the first
    few prompts already come from different modules.

    Args:
        count_tokens: number of tokens of a text.
    """
    heads: list[Prompt] = []
    middles: list[Prompt] = []
    for path in library_files(held_out=True):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        starts = [0, _middle_definition("".join(lines), len(lines))]
        for start, found in zip(starts, (heads, middles)):
            taken = _beginning(lines[start:], count_tokens)
            if taken and (start > 0 or found is heads):
                place = "beginning" if start == 0 else f"line {start + 1}"
                rest = start + taken
                text, following = "".join(lines[start:rest]), "".join(lines[rest:])
                found.append(Prompt(text, "code", f"{path.stem}.py, {place}", following))
    # Middles first: a module's beginning is mostly its documentation.
    return middles + heads


def _middle_definition(source: str, length: int) -> int:
    """Index of the line of the function, method or class nearest to the middle; 0 if none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return 0
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    lines = [node.lineno - 1 for node in ast.walk(tree) if isinstance(node, kinds)]
    return min(lines, key=lambda line: abs(line - length // 2), default=0)


def _beginning(lines: list[str], count_tokens: Callable[[str], int]) -> int:
    """Number of lines that fit into ``PROMPT_TOKENS``; 0 if that is too little to go on."""
    lengths = range(1, min(len(lines), PROMPT_TOKENS) + 1)
    fitting = bisect_right(lengths, PROMPT_TOKENS, key=lambda n: count_tokens("".join(lines[:n])))
    text = "".join(lines[:fitting])
    # A beginning that takes all lines leaves nothing to write.
    return fitting if fitting < len(lines) and count_tokens(text) >= MIN_TOKENS else 0
