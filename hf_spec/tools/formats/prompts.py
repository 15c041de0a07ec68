"""Prompt tokens of PPD, in the format of PEFT's prompt tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_spec.tools.formats.tables import AS_IN_PAPERS, Files, Reader

EMBEDDINGS = "prompt_embeddings"


def convert(tensors: Mapping[str, Tensor], _: Mapping[str, Any]) -> Files:
    """Fields of ``PPDConfig`` and the adapter's parameters; a ValueError if there are none."""
    found = tensors.get(EMBEDDINGS)
    if found is None or found.ndim != 2:
        raise ValueError(f"it has no tensor {EMBEDDINGS!r} (prompt tokens, hidden)")
    return {"num_prompt_tokens": len(found), **AS_IN_PAPERS}, {"prompts": found}


READERS = {"ppd": Reader(EMBEDDINGS.__eq__, convert, lambda _, names: EMBEDDINGS in names)}
