"""What is shared by all that draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_spec.files import replacing


def save_figure(figure: Any, path: Path) -> Path:
    """Write a PNG in one step."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight")
    return path
