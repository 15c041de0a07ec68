"""The scripts in ``benchmarks/`` and ``docs/`` as modules."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import save_checkpoint, write_prompts

from hf_spec.tools import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def load_script(name: str, folder: Path = ROOT / "benchmarks") -> Any:
    """A fresh module of a script in a folder."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As for a script: one may import another. Not longer, as some have the name of a package.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        spec.loader.exec_module(module)
    return module


def few_texts(kinds: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``long_prompts.KINDS`` reads is a page or two: a tokenizer of bytes takes seconds for
    the whole repository."""
    for name, files in {"docs": "docs/guides/t*.md", "code": "modeling_patches/m*.py"}.items():
        monkeypatch.setitem(kinds, name, kinds[name]._replace(files=(files,)))


#: Options of ``hf-spec train``.
SHORT = (
    "--max-steps", "2", "--eval-steps", "2", "--held-out", "1", "--served-prompts", "1",
    "--served-tokens", "4", "--dtype", "float32",
)  # fmt: skip


def commands_here(script: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """A script's commands run in this process, trainings for two steps; gives what has run."""
    run: list[tuple[str, ...]] = []

    def in_this_process(*words: str) -> None:
        run.append(words)
        assert cli.main([*words, *(SHORT if words[0] == "train" else ())]) == 0

    monkeypatch.setattr(script.measured, "command", in_this_process)
    return run


def base_answers_and_prompts(folder: Path, layers: int = 1) -> tuple[Path, Path, Path]:
    """A tiny model, a folder with 40 answers, and their prompts."""
    rows = [{"prompt": f"{n} and {n + 1}", "answer": f"{2 * n + 1} is it"} for n in range(40)]
    (folder / "answers").mkdir()
    write_prompts(folder / "answers" / "train.jsonl", rows)
    prompts = write_prompts(folder / "p.jsonl", [{"prompt": row["prompt"]} for row in rows])
    return save_checkpoint(folder / "base", layers=layers), folder / "answers", prompts
