"""The data of the demo model's training: sources of the installed Transformers."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path

#: Models whose files are kept out of the training data, for the loss on held-out files.
HELD_OUT = (
    "bert", "clip", "falcon", "gemma3", "gpt_neox", "mamba",
    "olmo3", "phi3", "qwen3", "t5", "vit", "whisper",
)  # fmt: skip


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
