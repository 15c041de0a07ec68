"""Published prompt tokens: the layout of the author's code (github.com/hmarkc, ppd-* on the Hub).

There an adapter is saved as PEFT saves prompt tuning: ``adapter_model.safetensors`` (or ``.bin``)
with one tensor ``prompt_embeddings`` (prompt tokens * EPTs, hidden), the EPTs of distance 1 first,
as here. What is published has one EPT each, for which all masks are the same. Learned weights,
heads and prefixes lie in further files, which are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

EMBEDDINGS = "prompt_embeddings"


def wants(name: str) -> bool:
    """Whether a tensor of this name is the adapter's."""
    return name == EMBEDDINGS


def convert(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of the config and parameters, from published tensors by name.

    Raises:
        ValueError: there are no prompt embeddings.
    """
    found = tensors.get(EMBEDDINGS)
    if found is None or found.ndim != 2:
        raise ValueError(f"it has no tensor {EMBEDDINGS!r} (prompt tokens, hidden)")
    return {"num_prompt_tokens": len(found)}, {"prompts": found}
