"""Reads published prompt tokens of the author's code (github.com/hmarkc, ppd-* on the Hub).

The author saves adapters as PEFT saves prompt tuning: ``adapter_model.safetensors`` (or ``.bin``)
has one tensor ``prompt_embeddings``, ``(prompt tokens * EPTs, hidden)``. As here, the EPTs of
distance 1 come first. The published adapters have one EPT each, for which all masks are equal.
Learned weights, heads and prefixes are in other files, which are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

EMBEDDINGS = "prompt_embeddings"
#: Files that hold them, the first one of these in a folder.
FILES = ("adapter_model.safetensors", "adapter_model.bin")


def wants(name: str) -> bool:
    """Whether a tensor of this name belongs to the adapter."""
    return name == EMBEDDINGS


def convert(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of ``PPDConfig`` and the adapter's parameters, from published tensors by name.

    Raises:
        ValueError: there are no prompt embeddings.
    """
    found = tensors.get(EMBEDDINGS)
    if found is None or found.ndim != 2:
        raise ValueError(f"it has no tensor {EMBEDDINGS!r} (prompt tokens, hidden)")
    return {"num_prompt_tokens": len(found)}, {"prompts": found}
